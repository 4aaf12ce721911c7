"""Formats of tool calls, one file each; each file defines `Parser`. The registry lists this folder."""
