"""The page to try a ranker: pick a user, see the history with its version, rank candidates, see what each step took.

One file without anything from elsewhere. What came from the service is set as text, never as markup.
"""

from __future__ import annotations

_STYLE = (
    "body{font:14px/1.45 system-ui,sans-serif;max-width:70rem;margin:1.5rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:.15rem .9rem .15rem 0;border-bottom:1px solid #8884}"
    "textarea{width:100%;height:9rem;font:12px ui-monospace,monospace}h2{margin:1.4rem 0 .3rem}"
    ".cols{display:flex;gap:2rem;flex-wrap:wrap}.scroll{max-height:22rem;overflow:auto}.bad{color:#b00}"
    ".bar{display:inline-block;height:.7rem;background:#47a}small{color:#777}"
)

_BODY = """
<h1>thinrow ranker</h1>
<p id="model"></p>
<label>User <input id="user" list="users"></label><datalist id="users"></datalist>
<button id="see">History</button> <small id="of"></small>
<div class="cols"><div><h2>History</h2><p id="version"></p><div class="scroll" id="history"></div></div>
<div style="flex:1;min-width:20rem"><h2>Request</h2><textarea id="request"></textarea><br>
<button id="rank">Rank</button> <span id="error" class="bad"></span>
<h2>Ranked</h2><p id="answer"></p><div class="scroll" id="ranked"></div>
<h2>What it took</h2><div id="took"></div></div></div>
"""

_SCRIPT = """
const at = id => document.getElementById(id);
const get = async (path, body) => {
  const answer = await fetch(path, body === undefined ? {} : {method: 'POST', body});
  const found = await answer.json();
  if (!answer.ok && found.error) throw new Error(answer.status + ': ' + found.error.message);
  return found;
};
const table = (names, rows) => {
  const made = document.createElement('table');
  for (const [kind, row] of [['th', names], ...rows.map(r => ['td', r])]) {
    const tr = made.insertRow();
    for (const value of row) {
      const cell = document.createElement(kind);
      if (value instanceof Node) cell.append(value); else cell.textContent = value;
      tr.append(cell);
    }
  }
  return made;
};
const columns = (of, skip) => {
  const names = Object.keys(of).filter(n => n !== skip);
  return [names, (of[names[0]] || []).map((_, i) => names.map(n => n === 'event_ts'
    ? new Date(of[n][i]).toISOString().replace('T', ' ').slice(0, 19)
    : n === 'score' ? of[n][i].toFixed(4) : JSON.stringify(of[n][i])))];
};
let fields;
const user = () => { const text = at('user').value; return /^-?\\d+$/.test(text) ? Number(text) : text; };
const fail = error => { at('error').textContent = error.message; };
const model = async () => {
  const found = await get('v1/model');
  fields = found.fields;
  at('model').textContent = found.arms.map(a => (a.arm ? 'arm ' + a.arm + ': ' : '') + a.release +
    (a.servers.length ? ' on ' + a.servers.length + ' servers' : ' in this process')).join('; ');
  return found;
};
const see = async () => {
  at('error').textContent = '';
  const found = await get('v1/history?user=' + encodeURIComponent(at('user').value));
  const v = found.version;
  at('version').textContent = found.events + ' events, ' + found.recent_events + ' of them recent; version ' +
    v.bytes.slice(0, 24) + '\\u2026 (' + v.seq_len + ' archived, checksum ' + v.checksum + ')';
  const [names, rows] = columns(found.history);
  at('history').replaceChildren(table(names, rows.reverse()));
};
const rank = async () => {
  at('error').textContent = '';
  const asked = JSON.parse(at('request').value);
  const found = await get('v1/rank', JSON.stringify({...asked, user: user()}));
  at('answer').textContent = 'request ' + found.request_id + ', model ' + found.model_version +
    (found.arm ? ', arm ' + found.arm : '') + (found.degraded_rows ? ', ' + found.degraded_rows + ' rows missing' : '');
  at('answer').className = found.degraded_rows ? 'bad' : '';
  const [names, rows] = columns(found.ranked);
  at('ranked').replaceChildren(table(['#', ...names], rows.map((r, i) => [i + 1, ...r])));
  const most = Math.max(...Object.values(found.took_ms), .001);
  at('took').replaceChildren(table(['step', 'ms', ''], Object.entries(found.took_ms).map(([name, ms]) => {
    const bar = document.createElement('span');
    bar.className = 'bar'; bar.style.width = (14 * ms / most) + 'rem';
    return [name, ms.toFixed(2), bar];
  })));
};
const start = async () => {
  const found = await model(), some = await get('v1/users');
  at('of').textContent = some.of + ' users';
  at('users').replaceChildren(...some.users.map(u => {
    const made = document.createElement('option');
    made.value = u;
    return made;
  }));
  const asked = new URLSearchParams(location.search), last = found.last;
  const empty = kinds => Object.fromEntries(Object.entries(kinds).map(([n, k]) => [n, k === 'string' ? '' : 0]));
  const lists = Object.fromEntries(Object.entries(empty(fields.candidates)).map(([n, v]) => [n, [v]]));
  at('request').value = asked.get('request') || JSON.stringify(
    {candidates: last.candidates || lists, context: last.context || empty(fields.context), k: 10}, null, 1);
  at('user').value = asked.get('user') || some.users[0];
  await see();
  if (asked.get('request')) await rank();
};
at('see').onclick = () => see().catch(fail);
at('rank').onclick = () => rank().then(model).catch(fail);
at('user').onchange = () => see().catch(fail);
start().catch(fail).then(() => document.body.dataset.ready = 'yes');
"""


def try_page() -> str:
    """HTML. ``?user=..&request=..`` ranks at once."""
    head = f'<meta charset="utf-8"><title>thinrow ranker</title><style>{_STYLE}</style>'
    body = f"{_BODY}<script>{_SCRIPT}</script>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'
