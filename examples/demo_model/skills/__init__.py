"""What agents need of the demo model: tools in two formats, answers in JSON to a schema."""
