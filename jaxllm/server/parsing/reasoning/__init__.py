"""Formats of reasoning, one file each; each file defines `Parser`. The registry lists this folder."""
