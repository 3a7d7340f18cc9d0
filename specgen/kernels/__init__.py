"""The ops of a decoding step: one op = one name in every backend, and the choice of a backend."""
