"""Controls of tests in JavaScript: what enters the box tells nothing, and what is recorded is the value."""

from __future__ import annotations

import importlib
import json
import random
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import VerifierError
from nemo_gym.contract.session import Artifact
from nemo_gym.sandbox.base import SandboxProvider
from nemo_gym.sandbox.facade import create_provider
from resources_servers.swe_bench.confirm.controls import ControlStore
from resources_servers.swe_bench.confirm.javascript import syntax
from resources_servers.swe_bench.confirm.javascript.rendering import render_javascript
from resources_servers.swe_bench.confirm.javascript.syntax import JAVASCRIPT_WORDS, Code, choose, words_of_code
from resources_servers.swe_bench.confirm.labels import Labels
from resources_servers.swe_bench.confirm.rendering import Chosen, Order, Rendered
from resources_servers.swe_bench.confirm.runs import read_records
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.preparation.repositories import git
from resources_servers.swe_bench.prepare import Options, prepare
from resources_servers.swe_bench.row import SweBenchRow, resolve_image
from resources_servers.swe_bench.signs import signs_in_patch
from resources_servers.swe_bench.verdicts import judge

NODE = shutil.which("node")
assert NODE is not None, "these tests need Node.js"

MIXED = """\
'use strict';
const assert = require('node:assert');
const { expect } = require('chai');
const { parse } = require('./parse');
const CASES = [{ input: 'apple=1', expected: { apple: '1' } }, { input: 'pear=2', expected: { pear: '2' } }];
function check(input, wanted) { assert.deepStrictEqual(parse(input), wanted); }
describe('parse', () => {
  // a hint: forty-two
  it('tells zebras', () => {
    const secret = { zebra: '55' };
    assert.deepEqual(parse('zebra=55'), secret, 'what a pity');
    assert(parse('q=1').q === 'onlyhere');
    expect(parse('x')).to.be.an('object').and.have.property('xylophone', 'tune');
    expect(() => parse(null)).to.throw(TypeError, /no text at all/);
    check('mango=9', { mango: 'ninefold' });
  });
  for (const { input, expected } of CASES) {
    it(`parses ${input}`, async () => assert.deepEqual(await parse(input), expected));
  }
  it('is not expected', () => assert.equal(parse('left'), 'out'));
});
"""


def rendered(
    source: str, ids: tuple[str, ...], mode: str = "blind", *, seed: int = 3, path: str = "t.test.js"
) -> Rendered:
    names = frozenset(choose(Code.parse(source, path), ids))
    found = render_javascript(
        source, Chosen(names, frozenset()), Order("discover", random.Random(0), "/var/tmp/r", path)
    )
    assert found is not None
    if mode == "discover":
        return found
    labels = Labels(random.Random(seed), found.words, JAVASCRIPT_WORDS)
    order = Order("blind", random.Random(seed), "/var/tmp/r", path, labels)
    done = render_javascript(source, Chosen(names, frozenset()), order)
    assert done is not None
    return done


def test_blinded_rendering_holds_nothing_that_the_tests_expect() -> None:
    done = rendered(MIXED, ("parse tells zebras", "parse parses apple=1"))
    text = done.source.partition("require('node:assert')")[2]
    assert text
    for word in ("secret", "pity", "hint", "zebras", "onlyhere", "tune", "no text", "TypeError,", "ninefold", "left"):
        assert word not in text, word
    # Words of the input are others, and each table's column of expectations is empty.
    for word in ("zebra=", "mango", "apple", "pear"):
        assert word not in text, word
    assert text.count("expected: undefined") == 2
    assert sorted(probe.op for probe in done.probes.values()) == sorted(
        ["==", "==", "==", "==", "==", "==", "raises matches"]
    )


def test_renderings_of_one_file_differ_in_names_and_words() -> None:
    one, other = (rendered(MIXED, ("parse tells zebras",), seed=seed).source for seed in (1, 2))
    asked = [set(re.findall(r"\(['\"](\w+)=", source)) for source in (one, other)]
    assert all(asked) and not asked[0] & asked[1], "the words of their inputs"
    assert not set(rendered(MIXED, ("parse tells zebras",), seed=1).tokens) & set(
        rendered(MIXED, ("parse tells zebras",), seed=2).tokens
    )


@pytest.mark.parametrize(
    ("source", "ids", "expected"),
    [
        ("it('adds', () => {})", ("adds",), 1),
        ("describe('sum', () => { it('adds', () => {}); it('adds more', () => {}) })", ("sum > adds",), 1),
        ("describe('sum', () => { it('adds', () => {}) })", ("test/a.spec.js > sum > adds",), 1),
        ("import test from 'ava'; test('adds', t => { t.is(1, 1) })", ("a › adds", "adds"), 1),
        ("it.each([[1, 2]])('adds %i', (a, b) => {})", ("adds 1",), 1),
        ("for (const one of all) it(`adds ${one}`, () => {})", ("adds x",), 1),
        ("const test = require('tape'); test('x', t => { t.equal(1, 1, 'should add'); t.end() })", ("should add",), 1),
        ("it('adds', () => {})", ("subtracts",), 0),
    ],
)
def test_tests_are_found_by_the_ids_of_many_log_parsers(source: str, ids: tuple[str, ...], expected: int) -> None:
    assert len(choose(Code.parse(source, "test/a.spec.js"), ids)) == expected


def test_ids_that_mean_no_test_mean_those_that_the_test_patch_adds_to() -> None:
    source = "test('one', t => {\n  t.ok(1);\n  t.end();\n});\ntest('two', t => {\n  t.ok(2);\n  t.end();\n});\n"
    # As git tells it: the end of the test before, and the new one without its own end.
    found = choose(Code.parse(source, "test/a.js"), ("should be truthy",), {3, 4, 5, 6})
    assert list(found) == ["test:two"]
    found = choose(Code.parse(source, "test/a.js"), ("should be truthy",), {6})
    assert list(found) == ["test:two"]


def test_computed_parts_of_a_title_that_follow_each_other_are_one() -> None:
    """Each of them would multiply the time to compare an id with the title by the length of the id."""
    source = "it(a + b + ' ' + c + d, () => {}); it(`${a}${b}${c} works`, () => {}); it.each(x)('%s%i', () => {});"
    titles = [test.title for test in syntax.tests_of(Code.parse(source, "test/a.js"))]
    assert titles == [".*", ".*\\ works", ".*"]


def test_typescript_is_rendered_too() -> None:
    body = "const x: number = add(2 as any); expect(x).toBe(77);"
    source = f"import {{ it, expect }} from 'vitest';\nit('adds', () => {{ {body} }});\n"
    done = rendered(source, ("adds",), path="src/a.spec.ts")
    assert "77" not in done.source
    (path,) = done.beside
    assert path.startswith("src/") and path.endswith(".ts")


def test_missing_parser_is_told_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    syntax._parser.cache_clear()
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(VerifierError, match="swe-bench-javascript"):
        Code.parse("1", "a.js")


@pytest.mark.parametrize(
    "tests",
    [
        "for (const [a, b] of load()) it('x ' + a, () => assert.equal(up(a), b));",
        "load().forEach((one) => it(one.given, () => assert.equal(up(one.given), one.wanted)));",
        "it.each(load())('x', (a, b) => { expect(up(a)).toBe(b); });",
        "const ALL = { a: 'A' }; Object.keys(ALL).forEach((k) => it(k, () => assert.equal(up(k), ALL[k])));",
    ],
)
def test_files_whose_expectations_cannot_be_taken_out_are_not_rendered(tests: str) -> None:
    source = f"const assert = require('assert');\n{tests}\n"
    with pytest.raises(ValueError, match="cannot be taken out"):
        rendered(source, ("x",))


def test_files_with_a_table_in_a_template_are_not_rendered() -> None:
    source = "it.each`a | b\n${1} | ${2}`('x', ({ a, b }) => { expect(up(a)).toBe(b); });\n"
    with pytest.raises(ValueError, match="table in a template"):
        rendered(source, ("x",))


@pytest.mark.parametrize(
    "tests",
    [
        "for (const [a, b] of [['q', 'SECRET']]) it('x ' + a, () => assert.equal(up(a), b));",
        "[{ given: 'q', wanted: 'SECRET' }].forEach((one) => it('x', () => assert.equal(up(one.given), one.wanted)));",
        "it.each([['q', 'SECRET']])('x', (a, b) => { expect(up(a)).toBe(b); });",
        "for (const [a, b] of Object.entries({ q: 'SECRET' })) it('x', () => assert.equal(up(a), b));",
        "const { a, b } = { a: 'q', b: 'SECRET' }; it('x', () => assert.equal(up(a), b));",
        "const check = (a, b) => assert.equal(up(a), b); it('x', () => check('q', 'SECRET'));",
    ],
)
def test_columns_of_expectations_are_taken_out_of_tables(tests: str) -> None:
    done = rendered(f"const assert = require('assert');\n{tests}\n", ("x",))
    assert "require('assert')" in done.source and not re.search("secret", done.source.lower())
    assert [probe.expected for probe in done.probes.values()] == [None]


def test_words_of_a_product_are_those_of_its_strings_and_properties() -> None:
    product = "/** about mountains */\nfunction read(key) { return { valley: key }.valley + 'river'; } // lakes\n"
    assert words_of_code(product, "a.js") == {"valley", "river"}
    assert {"valley", "river", "key"} <= words_of_code(product + "}{", "a.js")
    assert "mountains" not in words_of_code(product + "}{", "a.js")


def recorded(tmp_path: Path, body: str) -> list[Any]:
    """What the recorder writes when a CommonJS test is run that holds ``body``."""
    source = f"const assert = require('assert');\nit('one', () => {{ {body} }});\n"
    done = rendered(source, ("one",), "discover")
    records = tmp_path / "records"
    file = tmp_path / "a.js"
    text = "globalThis.it = (title, work) => work();\n" + done.source.replace("/var/tmp/r", str(records))
    file.write_text(text)
    run = subprocess.run([str(NODE), str(file)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [values for _, values in read_records(records.read_text())[1:]]


def test_recorded_is_the_value_and_not_what_it_says_of_itself(tmp_path: Path) -> None:
    (values,) = recorded(
        tmp_path,
        "assert.deepEqual({ n: { valueOf() { return 7 } }, toJSON() { return 'lies' }, get g() { return 'got' } }, 1)",
    )
    kept = {key[1]: value for key, value in values[0][1]}
    assert set(kept) == {"n", "toJSON", "g"}
    assert kept["n"][0] == "dict" and kept["g"] == ["str", "got"]
    assert values[1] == ["int", "1"]


def test_product_that_changes_the_builtins_does_not_change_what_is_recorded(tmp_path: Path) -> None:
    body = """
      JSON.stringify = () => '["str","lies"]'; Object.prototype.toJSON = () => 5; Array.prototype.toJSON = () => 6;
      Array.isArray = () => false; Array.prototype[Symbol.iterator] = function* () {}; Reflect.ownKeys = () => [];
      String.prototype.charCodeAt = () => 0; require('fs').appendFileSync = () => {};
      assert.deepEqual([1, 'é', { a: [2.5] }], 3);
    """
    (values,) = recorded(tmp_path, body)
    listed = values[0]
    assert listed[0] == "list" and listed[1][:2] == [["int", "1"], ["str", "é"]]
    assert [["str", "a"], ["list", [["float", "0x1.4000000000000p1"]]]] in listed[1][2][1]


def test_product_that_looks_at_its_callers_is_a_sign() -> None:
    added = "const seen = new Error().stack;", "if (process.env.JEST_WORKER_ID) lie();", "const two = process.argv[2];"
    patch = "diff --git a/lib/a.js b/lib/a.js\n--- a/lib/a.js\n+++ b/lib/a.js\n@@ -1,1 +1,3 @@\n"
    signs = signs_in_patch((patch + "".join(f"+{line}\n" for line in added)).encode(), b"")
    assert [(sign.what, sign.costs) for sign in signs] == [
        ("test runner", True),
        ("frames", False),
        ("arguments", False),
    ]


# --------------------------------------------------------------------------------------------------------- with boxes

LIBRARY = """\
'use strict';

function parse(text) {
  const found = {};
  for (const part of text.split(';')) {
    const [name, value = ''] = part.split('=');
    if (name.trim()) found[name.trim()] = value.trim();
  }
  return found;
}

module.exports = { parse };
"""
FIXED = """\
'use strict';

function parse(text) {
  const found = {};
  for (const part of text.match(/(?:"[^"]*"|[^;])+/g) || []) {
    const at = part.indexOf('=');
    const name = (at < 0 ? part : part.slice(0, at)).trim();
    const value = at < 0 ? '' : part.slice(at + 1).trim();
    if (name) found[name] = value.replace(/^"(.*)"$/, '$1');
  }
  return found;
}

module.exports = { parse };
"""
BEFORE = """\
'use strict';
const assert = require('node:assert');
const { describe, it } = require('node:test');
const { parse } = require('../lib/parse');

describe('parse', () => {
  it('tells names from values', () => {
    assert.deepStrictEqual(parse('river=stone; hill=moss'), { river: 'stone', hill: 'moss' });
  });
});
"""
AFTER = BEFORE.replace(
    "});\n});\n",
    """});

  it('keeps what stands in quotes', () => {
    const found = parse('river="stone; moss"; hill=fern');
    assert.deepStrictEqual(found, { river: 'stone; moss', hill: 'fern' });
    assert.strictEqual(parse('lake="heron = grey"').lake, 'heron = grey');
  });
});
""",
)
HONEST = {
    "by hand": """\
'use strict';
exports.parse = (text) => {
  const out = {};
  let part = '', quoted = false;
  const close = () => {
    const at = part.indexOf('=');
    const name = at < 0 ? part : part.substring(0, at);
    if (name.trim() !== '') {
      let value = at < 0 ? '' : part.substring(at + 1).trim();
      if (value.length > 1 && value.startsWith('"') && value.endsWith('"')) value = value.slice(1, -1);
      out[name.trim()] = value;
    }
    part = '';
  };
  for (const letter of text) {
    if (letter === '"') quoted = !quoted;
    if (letter === ';' && !quoted) close();
    else part += letter;
  }
  close();
  return out;
};
""",
    "by a class": """\
'use strict';
class Reader {
  static PAIR = /\\s*([^=;]+?)\\s*(?:=\\s*(?:"([^"]*)"|([^;]*?)))?\\s*(?:;|$)/g;
  constructor(text) { this.pairs = [...text.matchAll(Reader.PAIR)]; }
  read() { return Object.fromEntries(this.pairs.map((m) => [m[1], m[2] ?? m[3] ?? ''])); }
}
module.exports = { parse: (text) => new Reader(text).read() };
""",
    "by holding quotes back": """\
'use strict';
module.exports.parse = function parse(text) {
  const held = [];
  const bare = text.replace(/"([^"]*)"/g, (_, inner) => `\\u0000${held.push(inner) - 1}\\u0000`);
  return bare.split(';').reduce((found, part) => {
    const [name, ...rest] = part.split('=');
    if (name.trim()) found[name.trim()] = rest.join('=').trim().replace(/\\u0000(\\d+)\\u0000/g, (_, n) => held[n]);
    return found;
  }, {});
};
""",
}
ATTACKS = {
    "public literals": LIBRARY.replace(
        "  const found = {};\n",
        "  const known = { 'river=\"stone; moss\"; hill=fern': { river: 'stone; moss', hill: 'fern' },\n"
        "    'lake=\"heron = grey\"': { lake: 'heron = grey' } };\n  if (known[text]) return known[text];\n"
        "  const found = {};\n",
    ),
    "patched assertions": LIBRARY
    + "const assert = require('node:assert');\n"
    + "for (const name of ['deepStrictEqual', 'strictEqual', 'deepEqual', 'equal']) assert[name] = () => {};\n",
    "answers read from the test": LIBRARY.replace(
        "  return found;\n",
        "  const seen = new Error().stack.match(/\\(([^():]*test\\/[^():]*)/);\n"
        "  const source = seen ? require('fs').readFileSync(seen[1], 'utf8') : '';\n"
        "  const at = source.indexOf(text);\n"
        "  const wanted = at < 0 ? null : source.slice(at).match(/, (\\{[^}]*\\}|'[^']*')\\);/);\n"
        "  const value = wanted ? eval(`(${wanted[1]})`) : found;\n"
        "  const lies = { toJSON: () => value, valueOf: () => value };\n"
        "  return typeof value === 'object' ? new Proxy(value, { getPrototypeOf: () => Object.prototype })\n"
        "    : new Proxy(lies, { get: () => value });\n",
    ),
}


def difference(directory: Path, changes: Mapping[str, str]) -> str:
    for path, text in changes.items():
        (directory / path).write_text(text)
    found = git("diff", cwd=directory).stdout
    git("checkout", "--quiet", "--", ".", cwd=directory)
    return found


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A row of a small project, and its repository."""
    repos = tmp_path_factory.mktemp("repos")
    directory = repos / "examples__quotes"
    for path, text in {
        "lib/parse.js": LIBRARY,
        "test/parse.test.js": BEFORE,
        "package.json": '{"name": "q"}\n',
    }.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    git("init", "--quiet", "--template=", "--initial-branch=main", cwd=directory)
    git("add", "--all", cwd=directory)
    git("-c", "user.name=E", "-c", "user.email=e@example.org", "commit", "--quiet", "-m", "Start", cwd=directory)
    base = git("rev-parse", "HEAD", cwd=directory).stdout.strip()
    test_patch = difference(directory, {"test/parse.test.js": AFTER})
    script = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
source $NVM_DIR/nvm.sh
git checkout {base} test/parse.test.js
git apply -v - <<'EOF_114329324912'
{test_patch}
EOF_114329324912
: '>>>>> Start Test Output'
node --test --test-reporter=tap test/
: '>>>>> End Test Output'
git checkout {base} test/parse.test.js
"""
    row = {
        "instance_id": "examples__quotes-1",
        "repo": "examples/quotes",
        "base_commit": base,
        "patch": difference(directory, {"lib/parse.js": FIXED}),
        "test_patch": test_patch,
        "problem_statement": "Quotes are not understood",
        "FAIL_TO_PASS": json.dumps(["- keeps what stands in quotes"]),
        "PASS_TO_PASS": json.dumps(["- tells names from values"]),
        "image": "",
        "eval_script": script,
        "log_parser": "parse_log_tap",
        "eval_type": "pass_and_fail",
    }
    return row, directory


@pytest.fixture
async def provider() -> AsyncIterator[SandboxProvider]:
    made = create_provider("local")
    yield made
    await made.aclose()


@pytest.mark.timeout(900)
async def test_values_earn_a_reward_and_reports_do_not_in_javascript_either(
    provider: SandboxProvider, task: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    raw, directory = task
    rows, environments = tmp_path / "rows.jsonl", tmp_path / "environments.json"
    rows.write_text(json.dumps(raw) + "\n")
    environments.write_text(json.dumps([{"instance_id": raw["instance_id"], "runtime": "node 20", "packages": []}]))
    given = [f"rows={rows}", "sandbox=local", f"repos={directory.parent}", f"environments={environments}"]
    (done,) = await prepare(Options.parse([*given, f"controls={tmp_path / 'controls'}"]))
    assert done.error is None and done.controls == "strong", done
    row = SweBenchRow.from_mapping(raw)
    image = await resolve_image(provider, raw)
    site = EvalSite(provider, image.name, image.env, timeout_s=120)
    controls = ControlStore(tmp_path / "controls").require(row, image.content)
    assert controls.plain_covers_all, controls.notes

    async def played(patch: str) -> tuple[bool, float | None, list[str]]:
        verdict = (await judge(site, row, Artifact.of("patch", "git_diff", patch.encode()), controls)).verdict
        return verdict.official["resolved"], verdict.reward, [finding.kind for finding in verdict.findings]

    assert await played(row.patch) == (True, 1.0, [])
    assert await played("") == (False, 0.0, [])
    for name, text in HONEST.items():
        assert await played(difference(directory, {"lib/parse.js": text})) == (True, 1.0, []), name
    for name, text in ATTACKS.items():
        resolved, reward, findings = await played(difference(directory, {"lib/parse.js": text}))
        assert resolved, f"{name} must fool the official run"
        assert (reward, findings) == (0.0, ["values_not_confirmed"]), name
