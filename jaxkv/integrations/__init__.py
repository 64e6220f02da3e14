"""Adapters to other libraries, which are imported only by the file of their name."""
