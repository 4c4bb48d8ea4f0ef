"""A session of LiteLLM's library: python litellm_session.py http://127.0.0.1:8000 KEY

Chats go through its provider for compatible servers and through the one for vLLM.
"""

import json
import os
import urllib.request

# The prices of hosted models are nothing to fetch here.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

from common import ASK, BASE, CITY, KEY, WEATHER, expect, session, until_idle

litellm.suppress_debug_info = True
request = urllib.request.Request(f"{BASE}/v1/models", headers={"authorization": f"Bearer {KEY}"})
MODEL = json.load(urllib.request.urlopen(request))["data"][0]["id"]
PROVIDERS = ("openai", "hosted_vllm")


def chat(provider="openai", **extra):
    fields = {"messages": ASK, "max_tokens": 12, "temperature": 0, "num_retries": 0, **extra}
    return litellm.completion(model=f"{provider}/{fields.pop('name', MODEL)}", api_base=f"{BASE}/v1", api_key=fields.pop("key", KEY), **fields)


def completions():
    args = dict(model=f"text-completion-openai/{MODEL}", api_base=f"{BASE}/v1", api_key=KEY, prompt="Once upon", max_tokens=8, temperature=0)
    whole = litellm.text_completion(**args)
    text = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**args, stream=True))
    assert text == whole.choices[0].text and text


def chats():
    for provider in PROVIDERS:
        whole = chat(provider)
        chunks = list(chat(provider, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content, provider
        built = litellm.stream_chunk_builder(chunks, messages=ASK)
        assert built.usage.total_tokens == whole.usage.total_tokens, provider
        assert whole.usage.prompt_tokens_details.cached_tokens is not None


def logprobs_and_n():
    whole = chat(logprobs=True, top_logprobs=2)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    assert [choice.index for choice in chat(n=3, temperature=1, seed=1).choices] == [0, 1, 2]


def tools():
    for provider in PROVIDERS:
        named = {"type": "function", "function": {"name": "get_weather"}}
        args = dict(tools=[WEATHER], tool_choice=named, max_tokens=60)
        whole = chat(provider, **args).choices[0]
        (call,) = whole.message.tool_calls
        # The provider for vLLM leaves `additionalProperties` out, so that the model may go on until its limit.
        if provider == "openai":
            assert isinstance(json.loads(call.function.arguments)["city"], str) and whole.finish_reason == "tool_calls"
        built = litellm.stream_chunk_builder(list(chat(provider, **args, stream=True)), messages=ASK)
        assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
        assert built.choices[0].finish_reason == whole.finish_reason
        if whole.finish_reason == "length":
            continue
        messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
                    {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
        assert isinstance(chat(provider, messages=messages).choices[0].message.content, str)


def schemas():
    for provider in PROVIDERS:
        format = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
        answer = chat(provider, max_tokens=60, response_format=format)
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content)["city"], str)


def anthropic_messages():
    args = dict(model=f"anthropic/{MODEL}", api_base=BASE, api_key=KEY, messages=ASK, max_tokens=12, temperature=0)
    whole = litellm.completion(**args)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**args, stream=True))
    assert text == whole.choices[0].message.content and text


def responses():
    args = dict(model=f"openai/{MODEL}", api_base=f"{BASE}/v1", api_key=KEY, input="Say hi", max_output_tokens=12, temperature=0)
    whole = litellm.responses(**args).output[0].content[0].text
    deltas = [event.delta for event in litellm.responses(**args, stream=True) if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole


def errors():
    expect(litellm.NotFoundError, lambda: chat(name="nobody"))
    expect(litellm.BadRequestError, lambda: chat(temperature=-1))
    expect(litellm.ContextWindowExceededError, lambda: chat(max_tokens=10**6))
    expect(litellm.AuthenticationError, lambda: chat(key="wrong"))


def aborts():
    stream = chat(max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.completion_stream.response.close()
    until_idle()


session(completions, chats, logprobs_and_n, tools, schemas, anthropic_messages, responses, errors, aborts)
