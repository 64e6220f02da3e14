"""Views of an engine from outside: its statistics, and a picture of its pages, requests and programs."""
