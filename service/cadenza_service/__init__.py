"""The training service: parameter servers, round coordination, supervision, job store."""
