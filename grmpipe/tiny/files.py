"""A few text files as an environment of one's own, and a tool by which a judge searches them as the policy left them.

env=custom env.target=grmpipe.tiny.files.Files judge.tools.functions=grmpipe.tiny.files judge.tools.state=true

A row of the data gives the files: {"prompt": "...", "info": {"files": {"stock.txt": "12 apples\\n7 pears"}}}.
"""

import re
from collections.abc import Iterator, Mapping

import msgspec

from grmpipe.envs.env import Action, Episode, Observation, Opening, PolicyFault, State
from grmpipe.models.types import Message

__all__ = ["search_files"]  # the functions that are tools

COMMAND = re.compile(r"\s*(?:read (?P<read>\S+)\s*|write (?P<write>[\w.-]{1,64})\n(?P<text>.*))", re.ASCII | re.DOTALL)
MAX_CHARS, MAX_LINES = 100_000, 8  # of all that is written; found lines that are shown


class Folder(msgspec.Struct):
    """The files that were given, which stay as they were, and those that the policy wrote, by name."""

    given: dict[str, str]
    written: dict[str, str] = {}

    def to_state(self) -> bytes:
        return msgspec.json.encode(self)


class Files:
    """The policy reads a file (`read stock.txt`) or writes one (`write new.txt`, then its text); anything else is its
    answer. What it writes under the name of a given file hides that one from itself, and from no judge.
    """

    async def open(self, episode: Episode) -> Opening:
        self._folder = msgspec.json.decode(episode.saved, type=Folder) if episode.saved else read_given_files(episode)
        return Opening(messages=episode.prompt.messages, saved=self._folder.to_state())

    async def step(self, action: Action) -> Observation:
        folder, said = self._folder, COMMAND.fullmatch(action.text)
        if said is None:
            return Observation(done=True, saved=folder.to_state())
        if name := said["read"]:
            found = (folder.given | folder.written).get(name)
            if found is None:
                raise PolicyFault(f"there is no file {name}")
            reply = found
        else:
            text = said["text"].encode(errors="replace").decode()  # halves of characters are no JSON
            written = folder.written | {said["write"]: text}
            if sum(map(len, (*written, *written.values()))) > MAX_CHARS:
                raise PolicyFault("the folder is full")
            folder.written, reply = written, "written"
        return Observation(messages=[Message(role="user", content=reply)], saved=folder.to_state())

    async def close(self) -> None:
        pass


def read_given_files(episode: Episode) -> Folder:
    files = episode.prompt.info.get("files")
    if not isinstance(files, Mapping) or not files:
        raise ValueError(
            'prompt.info: holds no files; give rows such as {"prompt": "..", "info": {"files": {"a": ".."}}}'
        )
    return Folder(given={str(name): str(text) for name, text in files.items()})


def search_files(text: str, state: State) -> str:
    """The lines that hold a text: those of the given files, then those of files that the response wrote.

    Args:
        text: what to search, in any case
    """
    folder = msgspec.json.decode(state, type=Folder)
    found = [*find_lines(text, folder.given, "given"), *find_lines(text, folder.written, "written by the response")]
    return "\n".join(found[:MAX_LINES]) or "nothing was found"


def find_lines(text: str, files: Mapping[str, str], whose: str) -> Iterator[str]:
    for name, content in files.items():
        yield from (f"{name} ({whose}): {line[:200]}" for line in content.splitlines() if text.lower() in line.lower())
