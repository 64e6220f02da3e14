"""From requests to tokens: packing a plan into one array, compiled programs, text."""
