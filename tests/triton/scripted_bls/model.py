"""Test double of the BLS models: streams the prompt back word by word, two tokens and one accepted draft to a word.

Some words are orders: ERROR and UNAVAILABLE answer with an error, HANG waits until it is cancelled (and leaves a file
`cancelled` beside this one), SETTINGS shows the request's inputs as JSON, SLOW waits a second.
"""

import json
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


def text(value):
    return np.array([value.encode()], dtype=object)


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.decoupled = config["model_transaction_policy"]["decoupled"]

    def execute(self, requests):
        if not self.decoupled:
            return [self.whole(request) for request in requests]
        for request in requests:
            threading.Thread(target=self.stream, args=(request, request.get_response_sender())).start()
        return None

    def stream(self, request, sender):
        try:
            for response in self.blocks(request):
                if sender.is_cancelled():
                    (Path(__file__).parent / "cancelled").touch()
                    break
                sender.send(response)
        finally:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def whole(self, request):
        responses = list(self.blocks(request))
        errors = [response for response in responses if response.has_error()]
        if errors:
            return errors[0]
        texts = b"".join(response.output_tensors()[0].as_numpy()[0] for response in responses)
        rest = responses[-1].output_tensors()[1:]
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([texts], dtype=object)), *rest])

    def blocks(self, request):
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs}
        values = {name: tensor.as_numpy().tolist() for name, tensor in tensors.items() if tensor is not None}
        words = values["text_input"][0].decode().split()
        drafting = values.get("num_draft_tokens", [4])[0]
        for i, word in enumerate(words):
            if word == "ERROR":
                yield pb_utils.InferenceResponse(error=pb_utils.TritonError("the target\nrefuses"))
                return
            if word == "UNAVAILABLE":
                code = pb_utils.TritonError.UNAVAILABLE
                yield pb_utils.InferenceResponse(error=pb_utils.TritonError("the draft is not there", code))
                return
            if word == "HANG":
                for _ in range(1000):
                    time.sleep(0.02)
                    yield self.block("", [], i, len(words), drafting)
            if word == "SLOW":
                time.sleep(1.0)
            if word == "SETTINGS":
                shown = {
                    name: [v.decode() if isinstance(v, bytes) else v for v in value] for name, value in values.items()
                }
                word = json.dumps(shown)
            yield self.block(word + " ", [2 * i, 2 * i + 1], i + 1, len(words), drafting)

    def block(self, word, ids, done, num_words, drafting):
        figures = {
            "num_input_tokens": num_words,
            "num_output_tokens": 2 * done,
            "total_accepted_draft_tokens": done if drafting else 0,
            "total_draft_tokens": drafting * done,
        }
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text_output", text(word)),
                pb_utils.Tensor("output_ids", np.array(ids, dtype=np.int32)),
                *(pb_utils.Tensor(name, np.array([value], dtype=np.int32)) for name, value in figures.items()),
                pb_utils.Tensor("finish_reason", text("length" if done == num_words else "")),
            ]
        )
