"""Text: tokens to characters and back, chat templates, stop strings, what may reach a terminal."""
