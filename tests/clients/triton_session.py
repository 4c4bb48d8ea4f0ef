"""A session of Triton's HTTP client: python triton_session.py http://127.0.0.1:8000 KEY

The client speaks the Open Inference Protocol; it has no call of its own for the generate extension, whose answers and
streams are therefore asked for with plain requests.
"""

import json
import urllib.error
import urllib.request

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from common import BASE, CITY, KEY, expect, session, until_idle

HEADERS = {"authorization": f"Bearer {KEY}"}
CLIENT = triton.InferenceServerClient(BASE.removeprefix("http://"), network_timeout=120)
MODEL = CLIENT.get_model_repository_index(headers=dict(HEADERS))[0]["name"]


def request(path, body):
    head = {**HEADERS, "content-type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(f"{BASE}/v2/models/{MODEL}/{path}", json.dumps(body).encode(), head))


def tensor(name, values, kind="BYTES", dtype=np.object_, binary=True):
    array = np.array(values, dtype=dtype)
    return triton.InferInput(name, array.shape, kind).set_data_from_numpy(array, binary_data=binary)


def infer(*inputs, model=MODEL, **extra):
    return CLIENT.infer(model, list(inputs), headers=dict(HEADERS), **extra)


def text(result):
    return [value.decode() if isinstance(value, bytes) else value for value in result.as_numpy("text_output").flatten()]


def admin():
    assert CLIENT.is_server_live(headers=dict(HEADERS)) and CLIENT.is_server_ready(headers=dict(HEADERS))
    assert CLIENT.is_model_ready(MODEL, headers=dict(HEADERS)) and CLIENT.is_model_ready(MODEL, "1", headers=dict(HEADERS))
    assert not CLIENT.is_model_ready("nobody", headers=dict(HEADERS))
    assert "generate" in CLIENT.get_server_metadata(headers=dict(HEADERS))["extensions"]
    metadata = CLIENT.get_model_metadata(MODEL, headers=dict(HEADERS))
    assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1]}
    assert CLIENT.get_model_config(MODEL, headers=dict(HEADERS))["input"][0]["name"] == "text_input"


def infers():
    limits = tensor("max_tokens", [8], "INT32", np.int32), tensor("temperature", [0], "FP32", np.float32)
    plain = text(infer(tensor("text_input", ["Once upon"]), *limits))
    assert plain[0]
    in_json = triton.InferRequestedOutput("text_output", binary_data=False)
    inputs = tensor("text_input", ["Once upon"], binary=False), tensor("max_tokens", [8], "INT32", np.int32, binary=False)
    assert text(infer(*inputs, outputs=[in_json], parameters={"temperature": 0})) == plain
    parameters = tensor("sampling_parameters", [json.dumps({"max_tokens": 8, "temperature": 0})])
    both = infer(tensor("text_input", ["Once upon", "The sky"]), parameters, request_id="7")
    assert len(text(both)) == 2 and text(both)[0] == plain[0] and both.get_response()["id"] == "7"
    assert set(both.as_numpy("finish_reason").flatten()) <= {b"stop", b"length"}
    async_result = CLIENT.async_infer(MODEL, [tensor("text_input", ["Once upon"]), *limits], headers=dict(HEADERS)).get_result()
    assert text(async_result) == plain


def generates():
    body = {"text_input": "Once upon", "parameters": {"max_tokens": 8, "temperature": 0}}
    whole = json.load(request("generate", body))["text_output"]
    stream = request("generate_stream", body).read().decode()
    events = [json.loads(event.removeprefix("data: ")) for event in stream.strip().split("\n\n")]
    assert "".join(event["text_output"] for event in events) == whole and whole


def schemas():
    parameters = {"max_tokens": 60, "temperature": 0, "structured_outputs": {"json": CITY}}
    answer = json.load(request("generate", {"text_input": "A city as JSON:", "parameters": parameters}))
    if answer["details"]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["text_output"])["city"], str)


def errors():
    fault = expect(InferenceServerException, lambda: infer(tensor("text_input", ["x"]), model="nobody"))
    assert fault.status() == "404" and "nobody" in fault.message()
    fault = expect(InferenceServerException, lambda: infer(tensor("text", ["x"])))
    assert fault.status() == "400" and "text_input" in fault.message()
    fault = expect(InferenceServerException, lambda: infer(tensor("text_input", ["x"]), tensor("max_tokens", [10**6], "INT32", np.int32)))
    assert fault.status() == "400" and "8192" in fault.message()
    stranger = lambda: CLIENT.get_model_metadata(MODEL, headers={"authorization": "Bearer wrong"})
    assert expect(InferenceServerException, stranger).status() == "401"
    assert expect(urllib.error.HTTPError, lambda: request("generate", {"text": "x"})).code == 400


def aborts():
    body = {"text_input": "x", "parameters": {"max_tokens": 2000, "ignore_eos": True}}
    stream = request("generate_stream", body)
    stream.readline()
    stream.close()
    until_idle()


session(admin, infers, generates, schemas, errors, aborts)
