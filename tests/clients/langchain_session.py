"""A session of LangChain: python langchain_session.py http://127.0.0.1:8000 KEY"""

import json

import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from common import BASE, CITY, KEY, expect, session, until_idle

MODEL = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY).models.list().data[0].id


def chat(**extra):
    fields = {"max_tokens": 12, "temperature": 0, **extra}
    return ChatOpenAI(model=MODEL, base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, **fields)


@tool(args_schema=CITY)
def get_weather(city: str) -> str:
    """Weather of a city"""
    return f"Sunny in {city}"


def completions():
    model = OpenAI(model=MODEL, base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, max_tokens=8, temperature=0)
    whole = model.invoke("Once upon")
    assert whole and "".join(model.stream("Once upon")) == whole
    assert len(model.generate(["Once upon", "The sky"], n=1).generations) == 2


def chats():
    answer = chat().invoke("Say hi")
    assert answer.usage_metadata["output_tokens"] > 0 and answer.response_metadata["finish_reason"] in ("stop", "length")
    pieces = list(chat(stream_usage=True).stream("Say hi"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.content == answer.content and whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]
    assert [message.content for message in chat().batch(["Say hi"] * 3)] == [answer.content] * 3


def logprobs_and_n():
    answer = chat(logprobs=True, top_logprobs=2).invoke("Say hi")
    assert len(answer.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]
    several = chat(temperature=1, seed=1, n=3).generate([[HumanMessage("Say hi")]])
    assert len(several.generations[0]) == 3


def tools():
    bound = chat(max_tokens=60).bind_tools([get_weather], tool_choice="get_weather")
    answer = bound.invoke("Weather in Rome?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str)
    whole = None
    for piece in bound.stream("Weather in Rome?"):
        whole = piece if whole is None else whole + piece
    assert [c["args"] for c in whole.tool_calls] == [call["args"]]
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    after = chat().invoke([HumanMessage("Weather in Rome?"), AIMessage("", tool_calls=[call]), result])
    assert isinstance(after.content, str)
    # `required` also takes one call at a time.
    required = chat(max_tokens=60).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    assert len(required.invoke("Weather in Rome?").tool_calls) == 1


def schemas():
    schema = {"title": "City", **CITY}
    for method in ("json_schema", "function_calling"):
        model = chat(max_tokens=60).with_structured_output(schema, method=method)
        assert isinstance(model.invoke("A city")["city"], str), method
        *_, last = model.stream("A city")
        assert isinstance(last["city"], str), method
    object = chat(max_tokens=60, model_kwargs={"response_format": {"type": "json_object"}})
    try:
        assert isinstance(json.loads(object.invoke("A city as JSON").content), dict)
    except openai.LengthFinishReasonError:
        pass  # A valid end: the model went on until its limit.


def responses():
    model = chat(use_responses_api=True)
    answer = model.invoke("Say hi")
    whole = None
    for piece in model.stream("Say hi"):
        whole = piece if whole is None else whole + piece
    assert whole.text == answer.text and answer.text


def errors():
    expect(openai.NotFoundError, lambda: ChatOpenAI(model="nobody", base_url=f"{BASE}/v1", api_key=KEY).invoke("x"))
    expect(openai.BadRequestError, lambda: chat(max_tokens=10**6).invoke("x"))
    stranger = ChatOpenAI(model=MODEL, base_url=f"{BASE}/v1", api_key="wrong", max_retries=0)
    expect(openai.AuthenticationError, lambda: stranger.invoke("x"))


def aborts():
    stream = chat(max_tokens=2000, extra_body={"ignore_eos": True}).stream("Say hi")
    next(stream)
    stream.close()
    until_idle()


session(completions, chats, logprobs_and_n, tools, schemas, responses, errors, aborts)
