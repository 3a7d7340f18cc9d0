"""specgen: exact speculative decoding of quantised language models on one machine."""

__version__ = "0.1.0"
