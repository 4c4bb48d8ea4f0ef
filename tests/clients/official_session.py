"""A session of the official clients against a running server: completions, chats, streams, tools, schemas, errors, aborts.

    python session.py http://127.0.0.1:8000 KEY
"""

import json

import anthropic
import openai

from common import ASK, BASE, CITY, KEY, WEATHER, expect, until_idle


def text_of(stream):
    """Deltas of a streamed chat, and the usage of its last chunk."""
    text, usage = "", None
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    return text, usage


def chats(client, model):
    args = dict(model=model, messages=ASK, max_tokens=12, temperature=0)
    whole = client.chat.completions.create(**args, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    text, usage = text_of(client.chat.completions.create(**args, stream=True, stream_options={"include_usage": True}))
    assert text == choice.message.content and usage.total_tokens == whole.usage.total_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0
    several = client.chat.completions.create(**{**args, "temperature": 1, "seed": 1}, n=3)
    assert [c.index for c in several.choices] == [0, 1, 2]


def completions(client, model):
    whole = client.completions.create(model=model, prompt=["Once upon", "The sky"], max_tokens=5, n=2, logprobs=2, seed=1)
    assert len(whole.choices) == 4 and len(whole.choices[0].logprobs.tokens) == 5
    echoed = client.completions.create(model=model, prompt="Once upon", max_tokens=3, echo=True)
    assert echoed.choices[0].text.startswith("Once upon")


def schemas(client, model):
    format = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = client.chat.completions.create(model=model, messages=ASK, max_tokens=60, response_format=format)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content)["city"], str)
    chosen = client.chat.completions.create(model=model, messages=ASK, extra_body={"structured_outputs": {"choice": ["a", "b"]}})
    assert chosen.choices[0].message.content in ("a", "b")


def tools(client, model):
    args = dict(model=model, messages=ASK, tools=[WEATHER], max_tokens=60, temperature=0)
    whole = client.chat.completions.create(**args, tool_choice="required", parallel_tool_calls=False)
    call = whole.choices[0].message.tool_calls[0].function
    assert call.name == "get_weather"
    named = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(**args, tool_choice=named) as stream:
        for _ in stream:
            pass
        assert stream.current_completion_snapshot.choices[0].message.tool_calls[0].function.name == "get_weather"


def responses(client, model):
    args = dict(model=model, input="Say hi", max_output_tokens=12, temperature=0)
    whole = client.responses.create(**args)
    events = list(client.responses.create(**args, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert client.responses.retrieve(whole.id).id == whole.id
    client.responses.delete(whole.id)


def messages(model):
    client = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0)
    args = dict(model=model, max_tokens=12, messages=ASK, extra_body={"temperature": 0})
    whole = client.messages.create(**args)
    with client.messages.stream(**args) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    tool = {"name": "get_weather", "input_schema": CITY}
    called = client.messages.create(**{**args, "max_tokens": 60}, tools=[tool], tool_choice={"type": "any"})
    assert called.content[0].type == "tool_use"
    assert client.messages.count_tokens(model=model, messages=ASK).input_tokens > 0
    expect(anthropic.NotFoundError, lambda: client.messages.create(**{**args, "model": "nobody"}))


def errors(client, model):
    chat = client.chat.completions.create
    assert expect(openai.NotFoundError, lambda: chat(model="nobody", messages=ASK)).code == "model_not_found"
    assert expect(openai.BadRequestError, lambda: chat(model=model, messages=ASK, temperature=-1)).param == "temperature"
    long = expect(openai.BadRequestError, lambda: chat(model=model, messages=ASK, max_tokens=10**6))
    assert long.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{BASE}/v1", api_key="wrong", max_retries=0)
    expect(openai.AuthenticationError, lambda: stranger.models.list())


def aborts(client, model):
    stream = client.chat.completions.create(model=model, messages=ASK, max_tokens=500, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    until_idle()


def main():
    client = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0)
    model = client.models.list().data[0].id
    for part in (chats, completions, schemas, tools, responses, errors, aborts):
        part(client, model)
        print(f"ok: {part.__name__}")
    messages(model)
    print("ok: messages")


main()
