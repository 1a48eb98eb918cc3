"""Chat templates: the functions and whitespace that published ones need, the sandbox, and bounds on time and size."""

from pathlib import Path

import pytest
from jinja2 import Environment

import engine
from engine.errors import CheckpointError
from engine.prompt.sandbox import MAX_VALUE
from engine.prompt.template import ChatTemplate, TemplateError

USER = [{"role": "user", "content": "Hi"}]
PUBLISHED = Path(engine.__file__).parents[2] / "shared" / "data" / "templates"


def render(source, messages=USER, **variables):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}", "<s>[user]Hi"),
        ("{% if add_generation_prompt %}\nyes\n{% endif %}", "yes\n"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'a': '<é>', 'b': [1]} | tojson }}", '{"a": "<é>", "b": [1]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}", "0TrueTrue1"),
        ("{% for m in messages if m.role == 'x' %}{% else %}none{% endfor %}", "none"),
        ("{% set ns = namespace(n=0) %}{% for m in [1, 2] %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a' ~ 1) }}", "[a1]"),
        ("{% set t %}body{% endset %}{{ t | trim | upper }}", "BODY"),
        ("{{ 'a</think>b'.split('</think>')[-1].lstrip() }}{{ 'x'.replace('x', 'y') }}", "by"),
        (
            "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', 'x') | list }}",
            "user[]",
        ),
        ("{% generation %}reply{% endgeneration %}", "reply"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ '%s is %d' % ('x', 3) }}{{ '{} {a}'.format(1, a=2) }}", "x is 31 2"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{{ tools is none }}{{ nothing is defined }}", "TrueFalse"),
    ],
)
def test_what_published_templates_use_works(source, text):
    assert render(source) == text


def test_namespaces_that_hold_each_other_print_at_once():
    source = (
        "{% set ns = namespace(s=1) %}{% for i in range(99) %}{% set ns.s = namespace(a=ns.s, b=ns.s) %}{% endfor %}"
        "{{ ns.s }}{{ ns.s ~ '' }}{{ [ns] | string }}"
    )
    assert render(source) == "<Namespace><Namespace>[<Namespace>]"


def test_variables_of_the_caller_reach_the_template():
    assert render("{{ enable_thinking }}{{ tools[0].name }}", tools=[{"name": "f"}], enable_thinking=False) == "Falsef"


def test_concatenation_is_the_same_as_in_plain_jinja():
    source = "{{ 1 ~ 'a' ~ (2 ~ 'b') ~ {'k': 'x' ~ 'y'}.k ~ ['p' ~ 'q'][0] }}{% if 'a' ~ 'b' == 'ab' %}!{% endif %}"
    assert render(source) == Environment().from_string(source).render()


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{% if %}", "line 1"),
        ("\n\n{{ oops", "line 3"),
        ("{{ missing.field }}", "missing"),
        ("{{ 1 / 0 }}", "ZeroDivision"),
        ("{% include 'other' %}", "loader"),
        ("{{ 'x' | nofilter }}", "nofilter"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ messages[0].update(role='x') }}", "update"),
        ("{{ render.__globals__ }}", "undefined"),
        ("{{ (1).__class__ }}{{ range.__init__.__globals__ }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{{ lipsum() }}", "lipsum"),
    ],
)
def test_a_template_that_fails_is_a_one_line_error(source, named):
    with pytest.raises(TemplateError) as caught:
        render(source)
    text = str(caught.value)
    assert named in text and "\n" not in text and len(text) < 400
    assert isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**12 }}",
        "{{ [0] * 10**12 }}",
        "{{ 10**12 * 'a' }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ ('\n' * 1000000) | indent(99999) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000d}'.format(1) }}",
        "{{ '{:{}d}'.format(1, 99999) }}",
        "{{ range(100000) | map('string') | join(',' * 100000) }}",
        "{{ (',' * 100000).join(range(100000) | map('string')) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
        "{{ ('<' * 4000000) | escape }}",
        "{{ {'a': 'b'} | tojson(indent=10**9) }}",
        "{{ strftime_now('%A' * 100000) }}",
        "{{ range(10**9) | list }}",
        "{{ ('\t' * 1000000).expandtabs(99999) }}",
        "{{ ('a' * 1000000).translate({97: 'b' * 100000}) }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ ('%s' * 1000000) % (('a' * 1000000,) * 1000000) }}",
        "{{ ('{0}' * 100000).format('a' * 1000000) }}",
        "{{ ['a' * 1000000] * 1000000 }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% set t = 'a' * 4000000 %}{% set x %}{% for i in range(100000) %}{{ t }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(100000) %}" + "text " * 1000 + "{% endfor %}{% endset %}",
        "{% set ns = namespace(s='ab') %}{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}"
        "{% for i in range(99) %}{% set ns.s = m(ns.s) %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% for i in range(100000) %}{{ '" + 200 * "a" + "' }}{% endfor %}",
        "{% set x %}{% for i in range(100000) %}{{ '"
        + 999 * "a"
        + "' | replace('a', '"
        + 999 * "b"
        + "') }}{% endfor %}{% endset %}",
    ],
)
def test_texts_and_numbers_beyond_bounds_are_errors_before_they_exist(source):
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set r = range(3000) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set r = range(100000) | list %}{% for i in r %}{{ r | sum }}{% endfor %}",
        "{% set r = range(100000) | list %}{{ r | map('string') | map('list') | map('first') | list | length }}",
    ],
)
def test_endless_loops_end_at_a_bound(source, monkeypatch):
    monkeypatch.setattr("engine.prompt.sandbox.MAX_ITERATIONS", 50_000)
    with pytest.raises(TemplateError, match="loops more"):
        render(source)


def test_a_slow_template_ends_at_its_deadline(monkeypatch):
    monkeypatch.setattr("engine.prompt.sandbox.MAX_SECONDS", 0.05)
    with pytest.raises(TemplateError, match=r"longer than 0\.05 seconds"):
        render("{% for i in range(100000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}")


def test_a_template_of_unusual_size_is_an_error():
    with pytest.raises(TemplateError, match="limit"):
        ChatTemplate("x" * (1 << 21))


def test_long_conversations_are_within_the_bounds():
    messages = [{"role": "user", "content": "word " * 500}] * 400
    text = render("{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim ~ '\n' }}{% endfor %}", messages)
    assert 900_000 < len(text) < MAX_VALUE


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the folder of published templates is not beside the repository")
@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.jinja")), ids=lambda path: path.stem)
def test_published_templates_compile_and_render(path):
    template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2+2?"},
    ]
    text = template.render(conversation)
    assert all(message["content"] in text for message in conversation)
    assert template.render(USER, add_generation_prompt=False) != template.render(USER)
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
    }
    assert "add" in template.render(USER, tools=[tool])
