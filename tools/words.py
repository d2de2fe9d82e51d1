"""Renames by the table words.txt beside this file: usage `python words.py ROOT [--dry]`. Can be run again on any state.

Kinds (sections of the table; a line is `old -> new | options`):

    [move]     path -> path; module paths and mirrored tests go along
    [class]    a class or module-level function: its definer, everyone who imports it, comments and docs where it is
               distinctive. in=GLOB,.. chooses among definers of the same name
    [name]     an identifier (NAME tokens, f-strings too). in=GLOB,.. not=GLOB,..; str: equal string literals as well;
               doc: in backticks of comments, docstrings and docs as well; ok: may meet the new name in a file
    [key]      a dotted key of the configuration: as text everywhere, as a key of YAML by its path; `names`: also the
               identifier, equal string literals, `key:` at the start of a message, backticks
    [option]   group=choice: file of conf/ and mentions
    [metric]   area/name: everywhere
    [prose]    regex => text, in comments, docstrings and pages
    [text]     regex => text, anywhere in the files of in=GLOB,..

An entry whose old name is nowhere is only noted. One whose new name is taken is refused, and the exit code is 1.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve()
DRY = "--dry" in sys.argv
TABLE = Path(__file__).with_name("words.txt")
BINARY = (".png", ".npz", ".safetensors", ".parquet", ".gz", ".ico")
PAGES = ("*.md",)
HEAD = "## Names that changed"
SKIP = ("LICENSE", "*tokenizer*.json", "tests/*/data/*.json")


@dataclass
class Entry:
    kind: str
    old: str
    new: str
    within: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    hits: int = 0
    line: int = 0

    def covers(self, path: str) -> bool:
        return (not self.within or any(fnmatch(path, g) for g in self.within)) and not any(
            fnmatch(path, g) for g in self.without
        )


def read_table() -> list[Entry]:
    kind, entries = "", []
    for number, raw in enumerate(TABLE.read_text().splitlines(), 1):
        line = raw.rstrip()
        if not line.strip() or line.startswith("#"):
            continue
        if match := re.fullmatch(r"\[(\w+)\]", line.strip()):
            kind = match[1]
            continue
        options = ""
        body = line
        if match := re.fullmatch(r"(.*?) \| ((?:in=\S+|not=\S+|str|doc|ok|names|quiet|first)(?: (?:in=\S+|not=\S+|str|doc|ok|names|quiet|first))*)", line):
            body, options = match[1], match[2]
        arrow = " => " if kind in ("prose", "text") else " -> "
        if arrow not in body and kind in ("prose", "text") and body.rstrip().endswith(" =>"):
            old, new = body.rstrip()[:-3], ""
        else:
            old, new = body.split(arrow, 1)
        within, without, flags = [], [], set()
        for option in options.split():
            if option.startswith("in="):
                within += option[3:].split(",")
            elif option.startswith("not="):
                without += option[4:].split(",")
            else:
                flags.add(option)
        if kind in ("prose", "text"):
            old, new = old.strip(" "), new.strip(" ").replace("\\n", "\n").replace("␣", " ")
            old = old.replace("␣", " ")
        else:
            old, new = old.strip(), new.strip()
        entries.append(Entry(kind, old, new, tuple(within), tuple(without), frozenset(flags), 0, number))
    return entries


problems: list[str] = []
notes: list[str] = []


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout


# -- the tree in memory --------------------------------------------------------------------------------------------


@dataclass
class Tree:
    texts: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)  # files that aren't text
    moved: list[tuple[str, str]] = field(default_factory=list)


def load() -> Tree:
    tree = Tree()
    for name in git("ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        path = ROOT / name
        if not path.is_file() or path.is_symlink():
            continue
        if path.suffix in BINARY or any(fnmatch(name, g) for g in SKIP):
            tree.others.add(name)
            continue
        try:
            tree.texts[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            tree.others.add(name)
    tree.before = dict(tree.texts)
    return tree


# -- moves -----------------------------------------------------------------------------------------------------------


def dotted(path: str) -> str:
    return path[:-3].replace("/", ".")


def test_of(path: str) -> str:
    where = Path(path)
    return f"tests/{where.parent}/test_{where.name}"


def move_all(tree: Tree, entries: list[Entry]) -> None:
    files = set(tree.texts) | tree.others
    moves: dict[str, str] = {}
    for e in entries:
        if e.old.endswith("/"):
            found = {f: e.new + f[len(e.old) :] for f in files if f.startswith(e.old)}
        else:
            found = {e.old: e.new} if e.old in files else {}
        e.hits = len(found)
        if not found:
            there = any(f == e.new or (e.new.endswith("/") and f.startswith(e.new)) for f in files)
            notes.append(f"[move] {e.old}: " + ("done already" if there else "gone"))
        for a, b in found.items():
            if b in files:
                problems.append(f"[move] {a} -> {b}: there is such a file")
                continue
            moves[a] = b
            if a.endswith(".py") and not a.startswith("tests/"):
                t, u = test_of(a), test_of(b)
                if t in files and u not in files:
                    moves.setdefault(t, u)
    mods = {dotted(a): dotted(b) for a, b in moves.items() if a.endswith(".py")}
    parents = {tuple(a.rsplit(".", 1)): tuple(b.rsplit(".", 1)) for a, b in mods.items() if "." in a and "." in b}
    rx_mod = alternatives(mods, r"(?<![\w./])", r"(?!\w)")
    rx_path = alternatives(moves, r"(?<![\w/])", r"(?![\w])")
    rx_base = None
    for path, text in tree.texts.items():
        new = text
        if path.endswith(".py"):
            new = fix_from(new, parents)
        if rx_mod:
            new = rx_mod.sub(lambda m: mods[m[1]], new)
        if rx_path:
            new = rx_path.sub(lambda m: moves[m[1]], new)
        # links between pages and what stands beside them: ../benchmarks/x.md, x.md
        for a, b in moves.items():
            if a.endswith((".md", ".py")) and path.endswith(".md"):
                name, to = Path(a).name, Path(b).name
                if Path(a).parent == Path(b).parent and Path(a).parent == Path(path).parent:
                    new = re.sub(rf"(?<![\w/]){re.escape(name)}(?!\w)", to, new)
                elif Path(a).parent == Path(b).parent:
                    new = new.replace(f"../{a})", f"../{b})").replace(f"../{a}#", f"../{b}#")
        tree.texts[path] = new
    for a, b in moves.items():
        if a in tree.texts:
            tree.texts[b] = tree.texts.pop(a)
            tree.before[b] = tree.before.pop(a)
        else:
            tree.others.discard(a)
            tree.others.add(b)
        tree.moved.append((a, b))


def alternatives(names, before: str, after: str):
    if not names:
        return None
    return re.compile(before + "(" + "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True)) + ")" + after)


def fix_from(text: str, parents) -> str:
    """from a.b import c, where c is a module that moves."""
    if not parents:
        return text
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    lines, edits = text.splitlines(keepends=True), []
    renamed = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module:
            hit = [a for a in n.names if (n.module, a.name) in parents]
            if not hit:
                continue
            rest, ind = [a for a in n.names if a not in hit], " " * n.col_offset
            show = lambda a: a.name + (f" as {a.asname}" if a.asname else "")
            new = [f"{ind}from {n.module} import {', '.join(map(show, rest))}\n"] if rest else []
            for a in hit:
                module, name = parents[(n.module, a.name)]
                new.append(f"{ind}from {module} import {name}" + (f" as {a.asname}" if a.asname else "") + "\n")
                if not a.asname and a.name != name:
                    renamed[a.name] = name
            edits.append((n.lineno, n.end_lineno, "".join(new)))
    for start, end, new in sorted(edits, reverse=True):
        lines[start - 1 : end] = [new]
    text = "".join(lines)
    if renamed:
        text, _ = rename_tokens(text, renamed, {}, module_names=True)
    return text


# -- tokens ----------------------------------------------------------------------------------------------------------


@dataclass
class Tokens:
    spans: list  # (start, end, kind, string); kind: name, fstring, string, docstring, comment


def tokens_of(text: str) -> Tokens | None:
    starts, total = [0], 0
    for line in text.splitlines(keepends=True):
        total += len(line)
        starts.append(total)
    spans, previous, statement = [], None, ""
    try:
        for t in tokenize.generate_tokens(io.StringIO(text).readline):
            start, end = starts[t.start[0] - 1] + t.start[1], starts[t.end[0] - 1] + t.end[1]
            if previous in (None, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
                statement = t.string if t.type == tokenize.NAME else ""
            if t.type == tokenize.NAME:
                if statement == "from" and t.string == "import":
                    statement = ""
                path = statement in ("from", "import") and t.string not in ("from", "import", "as")
                spans.append((start, end, "path" if path else "name", t.string))
            elif t.type == tokenize.STRING:
                prefix = re.match(r"[A-Za-z]*", t.string)[0].lower()
                doc = previous in (None, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT) and '"""' in t.string
                code = t.string.count("\n") > 3 and "import " in t.string
                kind = "fstring" if "f" in prefix else "docstring" if doc or code else "string"
                spans.append((start, end, kind, t.string))
            elif t.type == tokenize.COMMENT:
                spans.append((start, end, "comment", t.string))
            if t.type not in (tokenize.NL, tokenize.COMMENT, tokenize.ENCODING):
                previous = t.type
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return None
    return Tokens(spans)


def holes(string: str):
    """(start, end) of the expressions in an f-string's braces."""
    depth, start, i, quote = 0, 0, 0, None
    while i < len(string):
        c = string[i]
        if depth == 0:
            if string[i : i + 2] in ("{{", "}}"):
                i += 2
                continue
            if c == "{":
                depth, start = 1, i + 1
        else:
            if c in "{[(":
                depth += 1
            elif c in "}])":
                depth -= 1
                if depth == 0:
                    yield start, i
        i += 1


def in_expression(expression: str, names: dict[str, str], strings: dict[str, str]) -> str:
    out, last = [], 0
    for match in re.finditer(r"'[^'\n]*'|\"[^\"\n]*\"|[A-Za-z_]\w*", expression):
        word = match[0]
        if word[0] in "'\"":
            new = word[0] + strings[word[1:-1]] + word[0] if word[1:-1] in strings else word
        else:
            new = names.get(word, word)
        out += [expression[last : match.start()], new]
        last = match.end()
    return "".join(out) + expression[last:]


def rename_tokens(text: str, names: dict[str, str], strings: dict[str, str], module_names: bool = False):
    """The text with these identifiers renamed, and how often each was."""
    tokens, counts, edits = tokens_of(text), defaultdict(int), []
    if tokens is None:
        return text, counts
    for start, end, kind, string in tokens.spans:
        if kind == "name" and string in names:
            if module_names and text[:start].rstrip().endswith("."):
                continue
            edits.append((start, end, names[string]))
            counts[string] += 1
        elif kind == "fstring":
            body, last = [], 0
            for a, b in holes(string):
                expression = string[a:b]
                new = in_expression(expression, names, strings)
                if new != expression:
                    body += [string[last:a], new]
                    last = b
                    for word in re.findall(r"[A-Za-z_]\w*", expression):
                        counts[word] += word in names
            if last:
                edits.append((start, end, "".join(body) + string[last:]))
        elif kind == "string":
            match = re.fullmatch(r"([A-Za-z]*)(\"\"\"|\"|'|''')(.*)\2", string, re.S)
            if match and match[3] in strings:
                edits.append((start, end, match[1] + match[2] + strings[match[3]] + match[2]))
                counts[match[3]] += 1
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text, counts


def in_prose(path: str, text: str, change) -> str:
    """`change` on comments and docstrings of Python, on all of a page."""
    if path.endswith(".md"):
        return change(text)
    if path.endswith(".yaml"):
        return re.sub(r"#.*", lambda m: change(m[0]), text)
    if not path.endswith(".py") or (tokens := tokens_of(text)) is None:
        return text
    for start, end, kind, string in reversed(tokens.spans):
        if kind in ("comment", "docstring"):
            new = change(string)
            if new != string:
                text = text[:start] + new + text[end:]
    return text


def words_of(text: str) -> set[str]:
    tokens = tokens_of(text)
    found = {s for _, _, k, s in tokens.spans if k == "name"} if tokens else set()
    if tokens:
        for _, _, k, s in tokens.spans:
            if k == "fstring":
                for a, b in holes(s):
                    found |= set(re.findall(r"[A-Za-z_]\w*", s[a:b]))
    return found


# -- identifiers -----------------------------------------------------------------------------------------------------


def distinctive(name: str) -> bool:
    return len(re.findall(r"[A-Z]", name)) > 1 or "_" in name


def bound_at_top(text: str) -> set[str]:
    found = set()
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return found
    for n in ast.walk(tree):
        if isinstance(n, ast.ClassDef):
            found.add(n.name)
    for n in tree.body:
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(n.name)
        targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AnnAssign) else []
        found |= {x.id for t in targets for x in ast.walk(t) if isinstance(x, ast.Name)}
    return found


def imports_of(text: str):
    """(module, name, as)"""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    return [
        (n.module, a.name, a.asname) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module for a in n.names
    ]


def rename_identifiers(tree: Tree, classes: list[Entry], names: list[Entry]) -> None:
    sources = {p: t for p, t in tree.texts.items() if p.endswith(".py")}
    bound = {p: bound_at_top(t) for p, t in sources.items()}
    imported = {p: imports_of(t) for p, t in sources.items()}
    words = {p: words_of(t) for p, t in sources.items()}
    plan: defaultdict[str, dict[str, str]] = defaultdict(dict)
    strings: defaultdict[str, dict[str, str]] = defaultdict(dict)
    docs: list[tuple[Entry, set[str] | None]] = []
    dots: list[tuple[str, str]] = []

    def want(path: str, e: Entry) -> bool:
        if plan[path].get(e.old, e.new) != e.new:
            problems.append(f"[{e.kind}] {e.old}: {path} gets {e.new} and {plan[path][e.old]}")
            return False
        plan[path][e.old] = e.new
        e.hits += 1
        return True

    for e in classes:
        definers = {p for p in sources if e.old in bound[p]}
        chosen = {p for p in definers if e.covers(p)} if e.within else definers
        if not chosen:
            notes.append(f"[class] {e.old}: gone" + (" (or defined elsewhere)" if definers else ""))
            continue
        src = {p for p in chosen if not p.startswith(("tests/", "benchmarks/"))} or chosen
        if len(src) > 1 and not e.within:
            problems.append(f"[class] {e.old}: defined in {sorted(src)}; give in=")
            continue
        if not e.within and len(chosen) > 1:
            chosen = src
        taken = [p for p in sources if e.new in bound[p] and "ok" not in e.flags]
        if taken and all(p.startswith(("tests/", "benchmarks/")) for p in chosen):
            notes.append(f"[class] {e.old}: done already; tests have one of their own")
            continue
        if taken:
            problems.append(f"[class] {e.old} -> {e.new}: taken in {taken}")
            continue
        holders, grew = set(chosen), True
        while grew:
            mods = {dotted(p) for p in holders}
            more = {p for p in sources if p not in holders for m, n, a in imported[p] if n == e.old and m in mods}
            grew = bool(more)
            holders |= more
        # module.Name through an imported module
        mods = {tuple(dotted(p).rsplit(".", 1)): p for p in holders if "/" in p}
        for p in sources:
            if p not in holders and e.old in words[p] and any((m, n) in mods for m, n, a in imported[p]):
                if re.search(rf"\b\w+\.{e.old}\b", sources[p]):
                    holders.add(p)
        for p in holders:
            if e.new in words[p] and "ok" not in e.flags:
                problems.append(f"[class] {e.old} -> {e.new}: {p} knows {e.new} already")
            want(p, e)
            if e.old[0].isupper():
                strings[p][e.old] = e.new
        docs.append((e, None if distinctive(e.old) else holders))
        for p in chosen:
            dots.append((f"{dotted(p)}.{e.old}", f"{dotted(p)}.{e.new}"))
    for e in names:
        any_hit = False
        for p in sources:
            if not e.covers(p):
                continue
            has_word = e.old in words[p]
            has_string = "str" in e.flags and re.search(rf"""["']{re.escape(e.old)}["']""", sources[p])
            if not (has_word or has_string):
                continue
            any_hit = True
            if has_word and e.new in words[p] and "ok" not in e.flags:
                problems.append(f"[name] {e.old} -> {e.new}: {p} has both")
                continue
            want(p, e)
            if "str" in e.flags:
                strings[p][e.old] = e.new
        if not any_hit:
            notes.append(f"[name] {e.old}: gone")
        if "doc" in e.flags or distinctive(e.old):
            docs.append((e, None))
    for p in sources:
        if plan[p] or strings[p]:
            tree.texts[p], _ = rename_tokens(tree.texts[p], plan[p], strings[p])
    for old, new in dots:
        rx = re.compile(rf"(?<![\w.]){re.escape(old)}(?!\w)")
        for p in [p for p, text in tree.texts.items() if old in text]:
            tree.texts[p] = rx.sub(new, tree.texts[p])
    # mentions
    for p, text in tree.texts.items():
        if not p.endswith((".py", ".md", ".yaml")):
            continue
        rules = []
        for e, holders in docs:
            if holders is not None and p not in holders and not p.endswith(".md"):
                continue
            if e.old not in text or (e.within and e.kind == "name" and not e.covers(p) and "doc" not in e.flags):
                continue
            if p.endswith(".md") and e.kind == "class" and e.old.islower() and "_" not in e.old:
                continue
            if e.kind == "class" and e.within and not p.endswith(".md") and holders is None and e.new not in text:
                continue
            if e.kind == "class" and distinctive(e.old) and e.old[0].isupper():
                rules.append((re.compile(rf"\b{e.old}\b"), e.new))
            elif p.endswith(".md") and "_" in e.old.strip("_") and not e.within:
                rules.append((re.compile(rf"\b{e.old}\b"), e.new))
            else:
                rules.append((re.compile(rf"(?<=`)((?:[\w.]+\.)?){e.old}(?=`|\(|\.)"), rf"\g<1>{e.new}"))
        if rules:

            def change(s: str) -> str:
                for rx, new in rules:
                    s = rx.sub(new, s)
                return s

            tree.texts[p] = in_prose(p, tree.texts[p], change)


# -- keys ------------------------------------------------------------------------------------------------------------


def yaml_keys(path: str, text: str, renamed: dict[str, str]) -> str:
    """Renames keys of a file of conf/ by their path."""
    parts = path.split("/")
    group = parts[1] if len(parts) == 3 and "@package _global_" not in text else ""
    stack, out = [], []
    for line in text.splitlines(keepends=True):
        match = re.match(r"^(\s*)([A-Za-z_]\w*):(?=\s|$)", line)
        if match:
            indent = len(match[1])
            while stack and stack[-1][0] >= indent:
                stack.pop()
            whole = ".".join([*([group] if group else []), *(k for _, k in stack), match[2]])
            stack.append((indent, match[2]))
            if whole in renamed:
                line = f"{match[1]}{renamed[whole].rsplit('.', 1)[-1]}:{line[match.end():]}"
        out.append(line)
    return "".join(out)


def rename_keys(tree: Tree, keys: list[Entry]) -> list[Entry]:
    """Returns the entries of names that follow."""
    paths = {e.old: e.new for e in keys}
    follow = []
    for p, text in tree.texts.items():
        new = text
        if p.startswith("conf/") and p.endswith(".yaml"):
            new = yaml_keys(p, new, paths)
            group = p.split("/")[1] if p.count("/") == 2 else ""
        for e in keys:
            if "." not in e.old:
                continue
            section, key = e.old.rsplit(".", 1)
            to_section, to_key = e.new.rsplit(".", 1)
            rx = re.compile(rf"(?<![\w/]){re.escape(section)}(\\?\.){key}(?!\w)")
            if section not in new or key not in new:
                continue
            new, count = rx.subn(lambda m: to_section.replace(".", m[1]) + m[1] + to_key, new)
            e.hits += count
        tree.texts[p] = new
    for e in keys:
        key, to = e.old.rsplit(".", 1)[-1], e.new.rsplit(".", 1)[-1]
        if "names" in e.flags and key != to:
            follow.append(Entry("name", key, to, e.within, e.without, frozenset({"str", "doc", "ok"}), 0, e.line))
            rx = re.compile(rf"""(?<=["'^`]){key}(?=:)""")
            for p in [p for p in tree.texts if p.endswith(".py") and e.covers(p)]:
                tree.texts[p] = rx.sub(to, tree.texts[p])
    return follow


def rename_options(tree: Tree, options: list[Entry]) -> None:
    for e in options:
        (group, old), (to_group, new) = e.old.split("="), e.new.split("=")
        one = re.compile(rf"(?<![\w.]){group}=(\[?(?:\w+,)*){old}(?![\w.])")
        for p, text in tree.texts.items():
            text, a = one.subn(rf"{to_group}=\g<1>{new}", text)
            b = 0
            if p.startswith("conf/"):
                text, b = re.subn(rf"(?m)^(\s*- (?:override )?/?){group}: {old}\s*$", rf"\g<1>{to_group}: {new}", text)
            e.hits += a + b
            tree.texts[p] = text


def rename_metrics(tree: Tree, metrics: list[Entry]) -> None:
    for e in metrics:
        if e.old.endswith("/"):
            rx = re.compile(rf"(?<![\w./=]){re.escape(e.old)}(?=[\w<{{*])(?!\w+\.(?:py|md|yaml))")
        else:
            rx = re.compile(rf"(?<![\w./]){re.escape(e.old)}(?![\w/])(?!\.(?:py|md|yaml|jinja))")
        for p, text in tree.texts.items():
            if e.covers(p) and e.old in text:
                tree.texts[p], count = rx.subn(e.new, text)
                e.hits += count
        if not e.hits:
            notes.append(f"[metric] {e.old}: gone")


def apply_rules(tree: Tree, rules: list[Entry]) -> None:
    made = [(e, re.compile(e.old, re.M)) for e in rules]
    for p, text in tree.texts.items():
        here = [(e, rx) for e, rx in made if e.covers(p) and rx.search(text)]
        prose = [(e, rx) for e, rx in here if e.kind == "prose"]
        if prose:

            def change(s: str) -> str:
                for e, rx in prose:
                    s, count = rx.subn(e.new, s)
                    e.hits += count
                return s

            text = in_prose(p, text, change)
        for e, rx in made:
            if e.kind == "text" and e.covers(p):
                if not e.within and not p.endswith((".py", ".md", ".yaml", ".jinja", ".toml", "Makefile")):
                    continue
                text, count = rx.subn(e.new, text)
                e.hits += count
        tree.texts[p] = text
    for e, _ in made:
        if not e.hits:
            notes.append(f"[{e.kind}] line {e.line}: nothing matches {e.old[:60]}")


# -- the changelog -----------------------------------------------------------------------------------------------------


def changelog(entries: list[Entry]) -> str:
    def rows(kind: str, wanted=lambda e: True) -> list[str]:
        chosen = [e for e in entries if e.kind == kind and "quiet" not in e.flags and wanted(e)]
        return [f"| `{e.old}` | `{e.new}` |" for e in chosen]

    table = ["| before | now |", "|---|---|"]
    user = [f"| {e.old} | {e.new} |" for e in entries if e.kind == "changelog"]
    public = ("conf/", "benchmarks/", "grmpipe/judge/templates/")
    parts = [
        HEAD,
        "",
        "Nothing was released, so there are no aliases. Runs made before can't be resumed.",
        "",
        "Keys and values of the configuration:",
        "",
        *table,
        *rows("key"),
        *rows("option"),
        *[f"| {e.old} | {e.new} |" for e in entries if e.kind == "value"],
        "",
        "Metrics:",
        "",
        *table,
        *rows("metric"),
        "",
        "Files, and fields in files:",
        "",
        *table,
        *user,
        *rows("move", lambda e: e.old.startswith(public)),
        "",
    ]
    return "\n".join(parts)


def put_glossary(tree: Tree) -> None:
    """The table under the heading of the words, by glossary.md beside this file."""
    page = tree.texts.get("CONTRIBUTING.md", "")
    glossary = TABLE.with_name("glossary.md").read_text().rstrip("\n")
    found = re.search(r"(?m)^## (?:The words|Words|Glossary)\n\n((?:\|.*\n)+)", page)
    if found:
        tree.texts["CONTRIBUTING.md"] = page[: found.start(1)] + glossary + "\n" + page[found.end(1) :]
    else:
        notes.append("CONTRIBUTING.md: no table of words to replace; put glossary.md there")


def wrap_all(limit: int = 120) -> None:
    """Comments, docstrings and lists of strings that grew too long are broken at a space or a comma."""
    for name in git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").splitlines():
        text = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).is_file() else ""
        if all(len(line) <= limit for line in text.splitlines()):
            continue
        tokens = tokens_of(text)
        ends = list(itertools.accumulate(len(line) for line in text.splitlines(keepends=True)))
        docs = [(a, b) for a, b, kind, s in (tokens.spans if tokens else []) if kind == "docstring"]
        comments = [a for a, b, kind, s in (tokens.spans if tokens else []) if kind == "comment"]
        out = []
        for line, end in zip(text.splitlines(), ends, strict=True):
            start = end - len(line) - 1
            indent = line[: len(line) - len(line.lstrip())]
            if len(line) <= limit:
                out.append(line)
                continue
            own = [a for a in comments if start <= a < end]
            if own and line.lstrip().startswith("#"):
                out += broken(line, indent + "# ", limit)
            elif own:
                at = own[0] - start
                out += [*broken(indent + line[at:], indent + "# ", limit), line[:at].rstrip()]
            elif any(a <= end and b >= start and b > start + limit - 3 or a <= start < b for a, b in docs):
                out += broken(line, indent, limit)
            elif match := re.fullmatch(r'(\s*)(\(\[.*\],) (r?".*"\),)', line):
                out += [match[1] + match[2], f"{match[1]} {match[3]}"]
            elif (match := re.fullmatch(r'(\s*)(r?f?)"((?:[^"\\]|\\.)*)"(,?)', line)) and "r" not in match[2]:
                out += split_string(match, limit)
            elif re.fullmatch(r'\s*("[^"]*",? ?)+', line) and ", " in line[:limit]:
                at = line.rindex(", ", 0, limit)
                out += [line[: at + 1], indent + line[at + 2 :]]
            else:
                out.append(line)
        (ROOT / name).write_text("\n".join(out) + "\n", encoding="utf-8")


def split_string(match: re.Match[str], limit: int) -> list[str]:
    """A string literal that stands alone on its line, as two."""
    indent, prefix, body, comma = match.groups()
    depth, at = 0, -1
    for i, c in enumerate(body[: limit - len(indent) - len(prefix) - 3]):
        depth += (c == "{") - (c == "}")
        if c == " " and depth == 0:
            at = i
    if at < 0:
        return [match[0]]
    parts = body[: at + 1], body[at + 1 :]
    kept = [prefix if "{" in part else "" for part in parts]
    return [f'{indent}{kept[0]}"{parts[0]}"', f'{indent}{kept[1]}"{parts[1]}"{comma}']


def broken(line: str, head: str, limit: int) -> list[str]:
    lines = []
    while len(line) > limit:
        at = line.rindex(" ", 0, limit + 1)
        lines.append(line[:at])
        line = head + line[at + 1 :]
    return [*lines, line]


def main() -> None:
    if "--wrap" in sys.argv:
        wrap_all()
        return
    entries, tree = read_table(), load()
    of = lambda kind: [e for e in entries if e.kind == kind]
    log = tree.texts.get("CHANGELOG.md", "")
    log = re.sub(rf"\n*{re.escape(HEAD)}\n.*?(?=\n## |\Z)", "\n", log, flags=re.S)
    if log:
        tree.texts["CHANGELOG.md"] = log
    move_all(tree, of("move"))
    apply_rules(tree, [e for e in of("text") if "first" in e.flags])
    follow = rename_keys(tree, of("key"))
    rename_identifiers(tree, of("class"), [*of("name"), *follow])
    rename_options(tree, of("option"))
    rename_metrics(tree, of("metric"))
    apply_rules(tree, of("prose"))
    apply_rules(tree, [e for e in of("text") if "first" not in e.flags])
    if log:
        text = tree.texts["CHANGELOG.md"].rstrip("\n")
        tree.texts["CHANGELOG.md"] = text + "\n\n" + changelog(entries)
    put_glossary(tree)
    for p, text in tree.texts.items():
        if p.endswith(".py"):
            try:
                ast.parse(text)
            except SyntaxError as error:
                problems.append(f"{p}: no longer parses: {error}")
    if not DRY:
        write(tree)
    for line in [*notes, *problems]:
        print(("! " if line in problems else "- ") + line)
    counts = defaultdict(int)
    for e in entries:
        counts[e.kind] += 1
    print("; ".join(f"{kind} {count}" for kind, count in counts.items()), f"; problems {len(problems)}")
    sys.exit(1 if problems else 0)


def write(tree: Tree) -> None:
    for a, b in tree.moved:
        (ROOT / b).parent.mkdir(parents=True, exist_ok=True)
        tracked = bool(git("ls-files", "--", a).strip())
        if tracked:
            git("mv", a, b)
        else:
            (ROOT / a).rename(ROOT / b)
        if b.endswith(".py") and not b.startswith(("tests/", "benchmarks/")):
            for parent in (ROOT / b).parents:
                if parent == ROOT:
                    break
                init = parent / "__init__.py"
                if not init.exists():
                    init.write_text("")
                    git("add", str(init))
    for p, text in tree.texts.items():
        if tree.before.get(p) != text:
            (ROOT / p).write_text(text, encoding="utf-8")


main()
