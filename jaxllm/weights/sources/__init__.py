"""Formats of weights, one a file, found by listing this folder: each has `holds` and `read`, see
`weights.stored.Source`."""
