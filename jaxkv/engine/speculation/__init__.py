"""Drafts of the next tokens, which decode steps verify; they change no token."""
