"""Chat templates that print little and never end are stopped; honest ones do not notice."""

from __future__ import annotations

import jinja2
import pytest
from jinja2.ext import loopcontrols

from lacache_trt.chat_template import ChatTemplate
from lacache_trt.errors import ArtifactError

MESSAGES = [
    {"role": role, "content": f"text {index}"}
    for index, role in enumerate(("system", "user", "assistant", "user"))
]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set l = range(9999) | list %}{% for i in l %}{% for j in l %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}"
        "{% endmacro %}{{ f(90) }}",
        "{% for i in range(100000) %}{% set x = 'a' * 4000000 %}{% endfor %}",
        "{% for i in range(100000) %}{% set x = range(90000) | list %}{% endfor %}",
    ],
    ids=["loops", "lists", "macros", "products", "filters"],
)
def test_templates_that_only_work_are_stopped(source: str) -> None:
    with pytest.raises(ArtifactError, match="too much work"):
        ChatTemplate(source).render(MESSAGES, {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ m.role }};"
        "{% else %}none{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index }} of {{ loop.length }}"
        "{{ loop.previtem.content if loop.previtem is defined }}{% endfor %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
        "{% for key, value in messages[0].items() %}{{ key }}={{ value }}{% endfor %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{% for x in [] %}{% else %}none{% endfor %}",
    ],
    ids=["loop", "filtered", "controls", "pairs", "recursive", "else"],
)
def test_counted_loops_render_as_jinja_renders_them(source: str) -> None:
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    expected = plain.from_string(source).render(messages=MESSAGES)
    assert ChatTemplate(source).render(MESSAGES, {}) == expected


def test_long_conversations_render_again_and_again() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content | trim }}{{ messages | length }}"
    template = ChatTemplate(source + "\n{% endfor %}")
    long = [{"role": "user", "content": "word " * 100}] * 2000
    for _ in range(3):
        assert template.render(long, {}).count("user: word") == 2000
