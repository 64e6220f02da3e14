"""Several engines of one model behind one front: which one serves a request, and which devices each one has."""
