"""Formats of tool calls, one file each. Each defines `Parser`; the registry lists the folder."""
