"""What the recent tier runs on a Redis server: scripts, each of one user or of the tier's own keys."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from thinrow.history.recent.redis_link import pack

#: Of KEYS list and ids: the record's last token ("" where there is no record), the new pair ("" forgets the user), the
#: call's token, blocks to drop from the front, how many blocks follow, how many of these go to the front, how many
#: fields of ids are dropped; then blocks, dropped fields, new pairs. 1 where it was done, 2 where it had been, 0 where
#: the record is another. What frees memory comes first: a full server lets a script go on that has begun to write.
WRITE = """
local list, ids = KEYS[1], KEYS[2]
local now = redis.call('LINDEX', list, 0) or ''
if string.sub(now, -8) ~= ARGV[1] then return string.find(now, ARGV[3], 21, true) and 2 or 0 end
local record = ARGV[2] .. (now == '' and string.rep('\\0', 24) or string.sub(now, 29)) .. ARGV[3]
local drop, blocks, front, gone = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local function each(first, last, call)
  for a = first, last, 4000 do call(unpack(ARGV, a, math.min(a + 3999, last))) end
end
local at = 8 + blocks
each(at, at + gone - 1, function(...) redis.call('HDEL', ids, ...) end)
if ARGV[2] == '' then
  redis.call('DEL', list)
elseif drop > 0 then
  redis.call('LTRIM', list, drop + 1, -1)
  each(8, 7 + front, function(...) redis.call('LPUSH', list, ...) end)
  redis.call('LPUSH', list, record)
elseif now == '' then
  redis.call('RPUSH', list, record)
else
  redis.call('LSET', list, 0, record)
end
each(8 + front, 7 + blocks, function(...) redis.call('RPUSH', list, ...) end)
each(at + gone, #ARGV, function(...) redis.call('HSET', ids, ...) end)
return 1
"""

#: ``WRITE`` of blocks alone, which is most of what is written. Of KEYS list: last token, new pair, token, blocks.
APPEND = """
local list = KEYS[1]
local now = redis.call('LINDEX', list, 0) or ''
if string.sub(now, -8) ~= ARGV[1] then return string.find(now, ARGV[3], 21, true) and 2 or 0 end
if now == '' then
  redis.call('RPUSH', list, ARGV[2] .. string.rep('\\0', 24) .. ARGV[3], ARGV[4])
else
  redis.call('LSET', list, 0, ARGV[2] .. string.sub(now, 29) .. ARGV[3])
  redis.call('RPUSH', list, ARGV[4])
end
for i = 5, #ARGV do redis.call('RPUSH', list, ARGV[i]) end
return 1
"""

#: Of KEYS list: through as 8 bytes. The record, how many blocks begin at it or before, and the last of these.
BEGINNING = """
local function above(a, b)
  for i = 1, 8 do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x > y end
  end
  return false
end
local low, high = 0, redis.call('LLEN', KEYS[1]) - 1
local last = ''
while low < high do
  local middle = math.ceil((low + high) / 2)
  local block = redis.call('LINDEX', KEYS[1], middle)
  if above(block, ARGV[1]) then high = middle - 1 else low, last = middle, block end
end
return {redis.call('LINDEX', KEYS[1], 0), math.max(low, 0), last}
"""

#: Of KEYS hash: pairs of a field and what it must hold ("" for nothing) and then holds. 1, or 0 where one does not.
ADVANCE = """
for i = 1, #ARGV, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[i]) or '') ~= ARGV[i + 1] then
    return redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 2] and 2 or 0
  end
end
for i = 1, #ARGV, 3 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
return 1
"""
#: Of KEYS meta: a floor in decimal digits, and a field to set or "". The larger of this floor and the one held.
RAISE = """
local held = redis.call('HGET', KEYS[1], 'floor') or '0'
if #ARGV[1] > #held or (#ARGV[1] == #held and ARGV[1] > held) then
  held = ARGV[1]
  redis.call('HSET', KEYS[1], 'floor', held)
end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], ARGV[2], '1') end
return held
"""

#: Of KEYS meta: fields and values of a new tier. 1, or 0 where there is one.
BEGIN = """
if redis.call('HEXISTS', KEYS[1], 'tier') == 1 then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV))
return 1
"""

#: ``APPEND`` or ``WRITE`` of new rows by who has not read the user, but guesses. Of KEYS list, ids, meta: last token of
#: the record, new pair, token, tier and floor as meta has them, how many ids; then ids, each with its pair, and blocks.
#: 1 or 2 as ``WRITE``; where the record is another, an id is known or meta another: record, tier, floor, and what was
#: held of each id and pair. (A pair that is asked for as if it were an id is none, or makes the guess wrong.)
GUESS = """
local list, ids, n = KEYS[1], KEYS[2], 2 * tonumber(ARGV[6])
local now = redis.call('LINDEX', list, 0) or ''
local meta = redis.call('HMGET', KEYS[3], 'tier', 'floor')
local held = n > 0 and redis.call('HMGET', ids, unpack(ARGV, 7, 6 + n)) or {}
local right = string.sub(now, -8) == ARGV[1] and meta[1] == ARGV[4] and meta[2] == ARGV[5]
for i = 1, n do right = right and not held[i] end
if not right then
  if string.find(now, ARGV[3], 21, true) then return 2 end
  return {now, meta[1], meta[2], held}
end
if now == '' then
  redis.call('RPUSH', list, ARGV[2] .. string.rep('\\0', 24) .. ARGV[3], unpack(ARGV, 7 + n))
else
  redis.call('LSET', list, 0, ARGV[2] .. string.sub(now, 29) .. ARGV[3])
  redis.call('RPUSH', list, unpack(ARGV, 7 + n))
end
if n > 0 then redis.call('HSET', ids, unpack(ARGV, 7, 6 + n)) end
return 1
"""
SCRIPTS = (APPEND, WRITE, GUESS, BEGINNING, ADVANCE, RAISE, BEGIN)
SHA = {script: hashlib.sha1(script.encode()).hexdigest().encode() for script in SCRIPTS}


def call_of(script: str, keys: Sequence[bytes], *arguments: bytes) -> bytes:
    """The command that runs one of ``SCRIPTS``."""
    return pack(b"EVALSHA", SHA[script], b"%d" % len(keys), *keys, *arguments)
