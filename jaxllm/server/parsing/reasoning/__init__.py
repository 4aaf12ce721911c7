"""Formats of reasoning, one file each. Each defines `Parser`; the registry lists the folder."""
