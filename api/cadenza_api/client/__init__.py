"""The Python client of the REST API: ``Client(url).submit(spec)``."""

from cadenza_api.client.client import Client
from cadenza_api.client.errors import ApiError, Unreachable
from cadenza_api.views import JobView

__all__ = ["ApiError", "Client", "JobView", "Unreachable"]
