"""Scripts of the repository itself; not part of the wheel."""
