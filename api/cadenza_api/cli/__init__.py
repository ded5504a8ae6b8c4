"""The command line, `cadenza`: one module a group of commands, and what they share."""
