"""What goes wrong, as OpenAI's clients expect to be told: an HTTP status and an object with message, type, param, code.

Knows the errors of the Triton client; not HTTP's machinery.
"""

from __future__ import annotations

import re
from typing import Any

from trtspec.errors import TrtspecError
from trtspec.triton.client import ServerError, ServerGone
from trtspec.triton.contract import BLS_INPUTS

_HTTP_STATUS = {  # gRPC's name -> HTTP
    "INVALID_ARGUMENT": 400,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "NOT_FOUND": 503,  # of the server's models: one is not loaded
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
_TENSORS = frozenset(tensor.name for tensor in BLS_INPUTS)
_FIELDS = {  # tensor -> the field of a request that it was made of, where the names differ
    "text_input": "prompt",
    "stop_words": "stop",
    "embedding_bias_words": "logit_bias",
}


class ApiError(TrtspecError):
    """A request that ends without an answer.

    Args:
        message: what is wrong, and what would be right.
        status: HTTP status.
        param: the field at fault.
        code: a short name that programs look for.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.problem, "type": kind, "param": self.param, "code": self.code}}


def refused(param: str, message: str) -> ApiError:
    """The error for a field that cannot be honoured."""
    return ApiError(f"{param}: {message}", param=param)


def api_error(error: Exception) -> ApiError:
    """Any error as an `ApiError`; what is nobody's known fault is an internal one, without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServerGone):
        return ApiError("the Triton server does not answer; try again later", status=503, code="server_unavailable")
    if isinstance(error, ServerError):
        message = error.message if error.fix is None else f"{error.message}; {error.fix}"
        name = re.split(r"[ :]", message, maxsplit=1)[0]  # the pipeline's complaints begin with the tensor's
        field = _FIELDS.get(name, name) if name in _TENSORS else None
        return ApiError(
            message if field is None else message.replace(name, field, 1),
            status=_HTTP_STATUS.get(error.status or "", 500),
            param=field,
            code="context_length_exceeded" if message.startswith("text_input has ") else None,
        )
    return ApiError(error.problem if isinstance(error, TrtspecError) else "internal error; see the log", status=500)
