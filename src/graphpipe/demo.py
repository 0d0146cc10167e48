"""The demonstration: two towers on handwritten digits, planned and trained as a graph."""
