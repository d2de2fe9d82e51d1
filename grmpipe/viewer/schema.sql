-- The index of one run. A row of rollouts is filled from several journals, in any order.
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
-- How far each journal was read, and the end of the line before, to notice that it was cut or rewritten.
CREATE TABLE journals (name TEXT PRIMARY KEY, offset INTEGER, after TEXT, inode INTEGER, unreadable INTEGER) WITHOUT ROWID;

-- round: of held-out rollouts the step after which they were evaluated; 0 in training. step: that trained it.
-- line, report: keys of the lines in the journals: offset * 4 + number of the journal.
CREATE TABLE rollouts (
  id INTEGER PRIMARY KEY,
  held_out INTEGER NOT NULL, round INTEGER NOT NULL, group_id TEXT NOT NULL, sibling INTEGER NOT NULL,
  line INTEGER, report INTEGER,
  prompt_id TEXT, source TEXT, question TEXT, answer TEXT, status TEXT, version INTEGER, tokens INTEGER,
  turns INTEGER, faults TEXT, took_s REAL,
  score REAL, reward REAL, spread REAL, votes INTEGER, failure TEXT,
  step INTEGER, outcome TEXT, advantage REAL, truth REAL,
  UNIQUE (held_out, round, group_id, sibling)
);
CREATE INDEX by_line ON rollouts (line);
CREATE INDEX by_report ON rollouts (report);
CREATE INDEX by_step ON rollouts (held_out, step);
CREATE INDEX by_prompt ON rollouts (prompt_id);

-- Of several judges, each one's own.
CREATE TABLE opinions (
  held_out INTEGER, round INTEGER, group_id TEXT, sibling INTEGER, judge TEXT,
  score REAL, reward REAL, spread REAL, votes INTEGER, failure TEXT,
  PRIMARY KEY (held_out, round, group_id, sibling, judge)
) WITHOUT ROWID;

-- Single judgements that failed, also where the verdict came about without them.
CREATE TABLE failures (
  held_out INTEGER, round INTEGER, group_id TEXT, sibling INTEGER, place INTEGER, judge TEXT, cause TEXT,
  PRIMARY KEY (held_out, round, group_id, sibling, place)
) WITHOUT ROWID;
CREATE INDEX by_cause ON failures (judge, cause);

-- Words of a line, found by its key; the texts themselves stay in the journals.
CREATE VIRTUAL TABLE words USING fts5 (text, content='', tokenize='unicode61 remove_diacritics 2');
