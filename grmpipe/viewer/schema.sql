-- The index of one run. A row of rollouts is filled from several journals, in any order.
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
-- How far each journal was read, and the end of the line before, to notice that it was cut or rewritten.
CREATE TABLE journals (name TEXT PRIMARY KEY, offset INTEGER, after TEXT, inode INTEGER, unreadable INTEGER) WITHOUT ROWID;

-- evaluation: the name of its prompts, of a held-out rollout; '' in training. round: the step after which it took place.
-- step: that trained it.
-- line, report: keys of the lines in the journals: offset * 4 + number of the journal.
CREATE TABLE rollouts (
  id INTEGER PRIMARY KEY,
  evaluation TEXT NOT NULL, round INTEGER NOT NULL, group_id TEXT NOT NULL, sibling INTEGER NOT NULL,
  line INTEGER, report INTEGER,
  prompt_id TEXT, source TEXT, question TEXT, answer TEXT, status TEXT, version INTEGER, tokens INTEGER,
  turns INTEGER, faults TEXT, took_s REAL,
  score REAL, reward REAL, spread REAL, votes INTEGER, failure TEXT,
  step INTEGER, outcome TEXT, advantage REAL, truth REAL,
  UNIQUE (evaluation, round, group_id, sibling)
);
CREATE INDEX by_line ON rollouts (evaluation, line);
CREATE INDEX by_step ON rollouts (evaluation, step, line);
CREATE INDEX by_prompt ON rollouts (prompt_id);

-- Of several judges, each one's own.
CREATE TABLE opinions (
  evaluation TEXT, round INTEGER, group_id TEXT, sibling INTEGER, judge TEXT,
  score REAL, reward REAL, spread REAL, votes INTEGER, failure TEXT,
  PRIMARY KEY (evaluation, round, group_id, sibling, judge)
) WITHOUT ROWID;

-- Single judgements that failed, also where the verdict came about without them.
CREATE TABLE failures (
  evaluation TEXT, round INTEGER, group_id TEXT, sibling INTEGER, place INTEGER, judge TEXT, cause TEXT,
  PRIMARY KEY (evaluation, round, group_id, sibling, place)
) WITHOUT ROWID;
CREATE INDEX by_cause ON failures (judge, cause);

-- What can be chosen in the form of the table: values that occur in a field.
CREATE TABLE choices (field TEXT, value TEXT, PRIMARY KEY (field, value)) WITHOUT ROWID;

-- Words of a line, found by its key; the texts themselves stay in the journals.
CREATE VIRTUAL TABLE words USING fts5 (text, content='', tokenize='unicode61 remove_diacritics 2');
