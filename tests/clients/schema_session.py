"""Random JSON schemas: every answer is a valid document, or ends by length.

    python schema_session.py http://127.0.0.1:8000 KEY [REQUESTS] [SEED]
"""

import asyncio
import json
import random
import sys
import time

import jsonschema
import openai

from common import BASE, KEY

REQUESTS = int(sys.argv[3]) if len(sys.argv) > 3 else 1000
SEED = int(sys.argv[4]) if len(sys.argv) > 4 else 1
PARALLEL = 16
VALIDATOR = jsonschema.Draft202012Validator
WORDS = ["id", "name", "größe", "tags", "unit price", "a/b", "x", "é", "$ref?", "note"]


def scalar(draw):
    kind = draw.choice(["string", "pattern", "format", "integer", "number", "boolean", "null", "enum", "const"])
    if kind == "string":
        low = draw.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 8)}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-z]{1,4}$", "^(red|green)$", "^[0-9]{3}-[0-9]{2}$", "^a+b?$"])}
    if kind == "format":
        return {"type": "string", "format": draw.choice(["date", "time", "uuid", "ipv4"])}
    if kind == "integer":
        low = draw.randint(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)}
    if kind == "number":
        low = draw.randint(-9, 9)
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + draw.randint(1, 9)}
    if kind == "enum":
        return {"enum": draw.sample(["a", "b\n", "ü", 1, -2.5, None, True, [1], {"k": "v"}], draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice(["x", 7, False, None, {"a": [1, "b"]}])}
    return {"type": kind}


def schema(draw, depth, names=()):
    kind = draw.choice(["scalar", "scalar", "object", "array", "anyOf", "tuple", "ref"]) if depth else "scalar"
    if kind == "object":
        keys = draw.sample(WORDS, draw.randint(0, 3))
        fields = {key: schema(draw, depth - 1, names) for key in keys}
        required = [key for key in keys if draw.random() < 0.7]
        extra = draw.choice([False, False, scalar(draw)]) if keys else False
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": extra}
    if kind == "array":
        low = draw.randint(0, 2)
        return {"type": "array", "items": schema(draw, depth - 1, names), "minItems": low, "maxItems": low + draw.randint(0, 2)}
    if kind == "tuple":
        items = [schema(draw, depth - 1, names) for _ in range(draw.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "anyOf":
        return {"anyOf": [schema(draw, depth - 1, names) for _ in range(draw.randint(1, 3))]}
    if kind == "ref" and names:
        return {"$ref": f"#/$defs/{draw.choice(names)}"}
    return scalar(draw)


def document(seed):
    """A schema that hangs on the seed alone."""
    draw = random.Random(seed)
    whole = schema(draw, 3, ("one", "two"))
    return {**whole, "$defs": {"one": schema(draw, 1), "two": scalar(draw)}}


async def ask(client, model, seed, gate, counts):
    async with gate:
        wanted = document(seed)
        VALIDATOR.check_schema(wanted)
        format = {"type": "json_schema", "json_schema": {"name": "random", "schema": wanted}}
        ask = [{"role": "user", "content": f"Document {seed % 7}"}]
        try:
            answer = await client.chat.completions.create(model=model, messages=ask, max_tokens=48, seed=seed, response_format=format)
        except openai.BadRequestError as error:
            # A schema that cannot be followed is refused by name, never ignored.
            assert error.param == "response_format", error
            counts.setdefault("refused", []).append((seed, error.message))
            return
        choice = answer.choices[0]
        assert choice.finish_reason in ("stop", "length"), choice
        counts[choice.finish_reason] = counts.get(choice.finish_reason, 0) + 1
        if choice.finish_reason == "stop":
            try:
                VALIDATOR(wanted, format_checker=VALIDATOR.FORMAT_CHECKER).validate(json.loads(choice.message.content))
            except Exception as fault:
                raise AssertionError(f"seed {seed}: {choice.message.content!r} against {json.dumps(wanted)}") from fault


async def main():
    client = openai.AsyncOpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, timeout=600)
    model = (await client.models.list()).data[0].id
    gate, counts, started = asyncio.Semaphore(PARALLEL), {}, time.time()
    await asyncio.gather(*(ask(client, model, SEED * 1_000_000 + i, gate, counts) for i in range(REQUESTS)))
    refused = counts.pop("refused", [])
    for seed, message in refused[:5]:
        print(f"   refused, seed {seed}: {message}")
    print(f"ok: {REQUESTS} random schemas: {counts}, {len(refused)} refused, {time.time() - started:.0f} s")
    assert len(refused) <= REQUESTS // 20, "too many schemas are refused"


asyncio.run(main())
