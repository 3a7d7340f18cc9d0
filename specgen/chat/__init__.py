"""Conversations: what was said, which tokens that is, how it is kept. No terminal in here."""
