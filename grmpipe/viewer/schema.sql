-- The index of one run. A row of rollouts is filled from several journals, in any order.
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
-- How far each journal was read, and the end of the line before, to notice that it was cut or rewritten.
CREATE TABLE journals (name TEXT PRIMARY KEY, offset INTEGER, after TEXT, inode INTEGER, unreadable INTEGER) WITHOUT ROWID;

-- What filters ask for, without long texts: a filter reads the whole table. id: in the order of the first lines.
-- evaluation: the name of its prompts, of a held-out rollout; '' in training. round: the step after which it took place.
-- step: that trained it.
-- line, report: keys of the lines in the journals: offset * 4 + number of the journal.
CREATE TABLE rollouts (
  id INTEGER PRIMARY KEY,
  evaluation TEXT NOT NULL, round INTEGER NOT NULL, group_id TEXT NOT NULL, sibling INTEGER NOT NULL,
  line INTEGER, report INTEGER,
  prompt_id TEXT, source TEXT, status TEXT, version INTEGER, tokens INTEGER, turns INTEGER, faults TEXT,
  score REAL, reward REAL, spread REAL, votes INTEGER, failure TEXT,
  step INTEGER, outcome TEXT, advantage REAL, truth REAL,
  UNIQUE (evaluation, round, group_id, sibling)
);
CREATE INDEX by_prompt ON rollouts (prompt_id);

-- Beginnings and ends of texts, shown in tables.
CREATE TABLE snippets (id INTEGER PRIMARY KEY, question TEXT, answer TEXT);

-- Of several judges, each one's own.
CREATE TABLE opinions (
  id INTEGER, judge TEXT, score REAL, reward REAL, spread REAL, votes INTEGER, failure TEXT,
  PRIMARY KEY (id, judge)
) WITHOUT ROWID;

-- Single judgements that failed, also where the verdict came about without them.
CREATE TABLE failures (
  id INTEGER, place INTEGER, judge TEXT, cause TEXT, detail TEXT,
  PRIMARY KEY (id, place)
) WITHOUT ROWID;
CREATE INDEX by_cause ON failures (cause, judge);

-- What can be chosen in the form of the table: values that occur in a field.
CREATE TABLE choices (field TEXT, value TEXT, PRIMARY KEY (field, value)) WITHOUT ROWID;

-- Words of a rollout's line (rowid 2 * id) and of its verdict's (2 * id + 1); the texts stay in the journals.
CREATE VIRTUAL TABLE words USING fts5 (text, content='', tokenize='unicode61 remove_diacritics 2');
INSERT INTO words (words, rank) VALUES ('hashsize', 33554432); -- bytes: a piece of the journals is one segment
