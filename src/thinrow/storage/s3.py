"""Objects in a bucket of an S3-compatible store, through obstore (the extra ``[s3]``).

Worked example: ``S3Objects("s3://histories/shop?endpoint=http://127.0.0.1:9000")`` keeps the object
``manifests/00000000000000000001.json`` under the key ``shop/manifests/00000000000000000001.json`` of the bucket
``histories``. Credentials are never part of a URL: they come from the environment (``AWS_ACCESS_KEY_ID``,
``AWS_SECRET_ACCESS_KEY``, ``AWS_SESSION_TOKEN``) or from the machine's role.

``put_if_absent`` is a conditional write (``If-None-Match: *``). A retry after a lost answer may find its own object
there: each write carries a token in its metadata, by which it knows itself.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from thinrow.core.errors import (
    CommitConflict,
    CorruptionError,
    InputError,
    MissingExtraError,
    ObjectNotFound,
    StoreError,
)
from thinrow.storage.fetch import Fetcher, FetchPolicy, Transient, given_up
from thinrow.storage.meter import current_meter
from thinrow.storage.objects import (
    I64,
    U8,
    BytesLike,
    Entries,
    Entry,
    Writer,
    as_bytes,
    by_object,
    check_name,
    is_there,
    missing,
    read_one,
    taken,
)
from thinrow.storage.ranges import check_places, plan_requests

R = TypeVar("R")

#: Bytes of one part of a multipart upload; up to ``_PARTS_AT_ONCE`` of them are under way beside one that fills.
PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 4
#: No store takes larger objects; offsets beyond it are damage, and sums of them could overflow.
_MAX_OBJECT_BYTES = 1 << 48
_TOKEN = "thinrow-writer"
_STATUS = re.compile(r"status code: (\d{3})")


@dataclass(frozen=True, slots=True)
class S3Location:
    """``s3://bucket/prefix?endpoint=URL&region=NAME``; what the URL leaves out comes from the environment."""

    bucket: str
    prefix: str
    endpoint: str | None = None
    region: str | None = None

    @classmethod
    def parse(cls, url: str) -> S3Location:
        """Raises InputError on anything else, credentials in it included."""
        parts = urlsplit(url)
        shape = "it must be s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME]"
        if parts.scheme != "s3" or not parts.hostname or parts.fragment:
            raise InputError(f"{url!r} is no object store: {shape}")
        if "@" in parts.netloc or ":" in parts.netloc:
            raise InputError(f"the URL of bucket {parts.hostname!r} holds credentials or a port; {shape}")
        options = dict(parse_qsl(parts.query))
        unknown = set(options) - {"endpoint", "region"}
        if unknown:
            raise InputError(f"unknown option {min(unknown)!r} in {url!r}; {shape}, credentials from the environment")
        prefix = parts.path.strip("/")
        if prefix:
            check_name(prefix)
        return cls(parts.netloc, prefix, options.get("endpoint"), options.get("region"))

    def __str__(self) -> str:
        named = [(k, v) for k, v in (("endpoint", self.endpoint), ("region", self.region)) if v is not None]
        return (
            f"s3://{self.bucket}{'/' * bool(self.prefix)}{self.prefix}{'?' * bool(named)}{urlencode(named, safe=':/')}"
        )


class _Upload:
    def __init__(self, file: Any, say: Callable[[Exception], Exception]) -> None:
        self._file, self._say = file, say

    def write(self, data: BytesLike) -> None:
        view = as_bytes(data)
        try:
            # A piece a part: a larger one would be copied whole beside the buffer.
            for at in range(0, len(view), PART_BYTES):
                self._file.write(view[at : at + PART_BYTES])
        except Exception as e:
            raise self._say(e) from e


class _Forked:
    """obstore's threads do not follow into a forked process: there its requests would wait until they time out."""

    used = False
    lost = False

    @classmethod
    def note(cls) -> None:
        cls.lost = cls.used

    @classmethod
    def check(cls) -> None:
        if cls.lost:
            raise StoreError(
                "this process was forked from one that had used an object store; start processes with spawn instead"
            )
        cls.used = True


os.register_at_fork(after_in_child=_Forked.note)


class S3Objects:
    """An ``ObjectStore`` in a bucket, under a prefix. Safe for threads; a process that uses it must not be forked.

    An object under ``create`` is a multipart upload, which is aborted after an exception. A killed process may leave
    one, invisible but paid for: give the bucket a lifecycle rule that ends incomplete uploads.
    """

    def __init__(self, location: str | S3Location, policy: FetchPolicy | None = None) -> None:
        """Nothing is sent yet.

        Raises:
            InputError: the URL is not one of S3.
            MissingExtraError: obstore is not installed.
            StoreError: this process was forked from one that had used an object store.
        """
        _Forked.check()
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError:
            raise MissingExtraError("obstore", "s3") from None
        self.location = S3Location.parse(location) if isinstance(location, str) else location
        self.policy = policy or FetchPolicy()
        self._obs = obstore
        options: dict[str, Any] = {}
        if self.location.endpoint is not None:
            options["endpoint"] = self.location.endpoint
        if self.location.region is not None:
            options["region"] = self.location.region
        endpoint = self.location.endpoint or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
        client: dict[str, Any] = {
            "allow_http": endpoint.startswith("http://"),
            "timeout": timedelta(seconds=self.policy.timeout_s),
            "connect_timeout": timedelta(seconds=min(5.0, self.policy.timeout_s)),
        }

        def open_store(tries: int) -> Any:
            retry: dict[str, Any] = {
                "max_retries": tries - 1,
                "retry_timeout": timedelta(seconds=self.policy.deadline_s),
                "backoff": {"init_backoff": timedelta(seconds=self.policy.backoff_s)},
            }
            return S3Store(
                self.location.bucket,
                prefix=self.location.prefix or None,
                client_options=client,  # type: ignore[arg-type]
                retry_config=retry,  # type: ignore[arg-type]
                **options,
            )

        # What is sent again is decided and counted here; the parts of an upload alone are left to the library.
        self._store = open_store(1)
        self._uploads = open_store(self.policy.tries)
        self._fetcher = Fetcher(self._get_range, self.policy, str(self.location))

    def __reduce__(self) -> tuple[type[S3Objects], tuple[S3Location, FetchPolicy]]:
        """The same bucket, opened anew, with the credentials of that process."""
        return S3Objects, (self.location, self.policy)

    @property
    def concurrency(self) -> int:
        return self.policy.concurrency

    def put_if_absent(self, name: str, data: bytes) -> None:
        check_name(name)
        token = uuid.uuid4().hex
        doubtful = False

        def put() -> bool:
            nonlocal doubtful
            try:
                self._obs.put(self._store, name, data, mode="create", use_multipart=False, attributes={_TOKEN: token})
                return True
            except Exception as e:
                said = self._explain(e, name)
                if isinstance(said, CommitConflict):
                    # 409 is another conditional write under way; it may yet fail.
                    if _status(e) == 409:
                        raise Transient(_first_line(e)) from e
                    return doubtful and self._is_ours(name, token)
                doubtful = doubtful or isinstance(said, Transient)
                raise said from e

        if not self._persist(name, put):
            raise taken(name)

    def put(self, name: str, data: bytes) -> None:
        check_name(name)
        if len(data) > PART_BYTES:
            with self.create(name) as writer:
                writer.write(data)
            return
        self._persist(name, lambda: self._obs.put(self._store, name, data, use_multipart=False))

    def get(self, name: str) -> bytes:
        check_name(name)
        data = bytes(self._persist(name, lambda: self._obs.get(self._store, name).bytes()))
        current_meter().add(bytes_fetched=len(data))
        return data

    def size(self, name: str) -> int:
        check_name(name)
        return int(self._persist(name, lambda: self._obs.head(self._store, name))["size"])

    def has(self, name: str) -> bool:
        return is_there(self, name)

    def list(self, prefix: str, after: str = "") -> list[str]:
        return [e.name for e in self.entries(prefix, after)]

    def entries(self, prefix: str, after: str = "") -> Entries:
        folder = prefix.rpartition("/")[0]

        def pages() -> Entries:
            found = self._obs.list(self._store, folder or None, offset=after or None)
            return [
                Entry(m["path"], int(m["size"]), int(m["last_modified"].timestamp() * 1000)) for p in found for m in p
            ]

        return sorted(e for e in self._persist(prefix or "the bucket", pages) if e.name.startswith(prefix))

    def sweep(self, before_ms: int) -> int:
        # What a killed upload leaves, obstore cannot list: the bucket's lifecycle rule ends it.
        return 0

    def delete(self, name: str) -> None:
        check_name(name)
        self._persist(name, lambda: self._obs.delete(self._store, name))

    def mapped(self, names: Sequence[str]) -> tuple[U8, ...] | None:
        return None

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        check_name(name)
        token = uuid.uuid4().hex
        file = self._obs.open_writer(
            self._uploads,
            name,
            buffer_size=PART_BYTES,
            max_concurrency=_PARTS_AT_ONCE,
            attributes={_TOKEN: token},
        )
        file.__enter__()
        try:
            yield _Upload(file, lambda e: self._final(e, name))
        except BaseException as e:
            # Ends the upload; where even that fails, the first failure is the one to tell.
            with suppress(Exception):
                file.__exit__(type(e), e, e.__traceback__)
            raise
        current_meter().add(requests=1)
        try:
            file.__exit__(None, None, None)
        except Exception as e:
            # Where the answer to the last step is lost, its repetition finds no upload any more.
            if not (isinstance(e, FileNotFoundError) and self._is_ours(name, token)):
                raise self._final(e, name) from e

    def _is_ours(self, name: str, token: str) -> bool:
        """Whether the object is there by the write of that token."""
        try:
            found = self._persist(name, lambda: self._obs.get(self._store, name))
        except ObjectNotFound:
            return False
        return bool(found.attributes.get(_TOKEN) == token)

    read_into = read_one

    def read_many(
        self,
        names: Sequence[str],
        which: I64,
        offsets: I64,
        lengths: I64,
        out: U8,
        out_offsets: I64,
        gap: int | None = None,
    ) -> None:
        _Forked.check()
        for name in names:
            check_name(name)
        asked = list(by_object(names, which))
        hostile = (offsets < 0) | (lengths < 0) | (offsets > _MAX_OBJECT_BYTES) | (lengths > _MAX_OBJECT_BYTES)
        if hostile.any():
            i = int(hostile.argmax())
            raise CorruptionError(f"no {lengths[i]} bytes at {offsets[i]} in any object", file=names[which[i]])
        check_places(lengths, out, out_offsets)
        near = self.policy.gap_bytes if gap is None else gap
        plan = plan_requests(which, offsets, lengths, out_offsets, near, self.policy.request_bytes)
        sizes = self._fetcher.fetch(names, plan, out, current_meter())
        # An empty range costs no request, but it must lie in its object all the same.
        for name, mine in asked:
            empty = mine[lengths[mine] == 0]
            if len(empty):
                size = sizes[name] if name in sizes else self.size(name)
                if int(offsets[empty].max()) > size:
                    raise CorruptionError(f"no byte {offsets[empty].max()}: the file has {size} bytes", file=name)

    async def _get_range(self, name: str, start: int, stop: int) -> tuple[Any, int]:
        try:
            answer = await self._obs.get_async(self._store, name, options={"range": (start, stop)})
            return await answer.bytes_async(), int(answer.meta["size"])
        except Exception as e:
            if _status(e) == 416:
                raise CorruptionError(f"no {stop - start} bytes at {start}: the file ends before", file=name) from e
            raise self._explain(e, name) from e

    def _persist(self, name: str, call: Callable[[], R]) -> R:
        """``call`` with retries; what obstore raises becomes what thinrow raises."""
        _Forked.check()
        meter = current_meter()
        for tried in range(1, self.policy.tries + 1):
            meter.add(requests=1)
            try:
                return call()
            except Transient as e:
                last: Exception = e
            except StoreError:
                raise
            except Exception as e:
                last = self._explain(e, name)
                if not isinstance(last, Transient):
                    raise last from e
            if tried < self.policy.tries:
                meter.add(retries=1)
                time.sleep(self.policy.wait_s(tried))
        raise given_up(str(self.location), name, self.policy.tries, last)

    def _final(self, error: Exception, name: str) -> Exception:
        """As ``_explain`` where nothing is tried again."""
        said = self._explain(error, name)
        return given_up(str(self.location), name, self.policy.tries, said) if isinstance(said, Transient) else said

    def _explain(self, error: Exception, name: str) -> Exception:
        """The thinrow error of an obstore error; ``Transient`` where it may pass."""
        text, line, status = str(error), _first_line(error), _status(error)
        kind = type(error).__name__
        if isinstance(error, (StoreError, CorruptionError, Transient)):
            return error
        if "NoSuchBucket" in text:
            return StoreError(
                f"there is no bucket {self.location.bucket!r} ({self.location}); make it, or correct the URL"
            )
        if isinstance(error, FileNotFoundError):
            return missing(name)
        if kind in ("AlreadyExistsError", "PreconditionError"):
            return taken(name)
        # Without credentials obstore asks the machine for its role, at an address that only clouds answer.
        if "169.254.169.254" in text or "redentials" in line:
            return StoreError(
                f"no credentials for {self.location}: {line}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if kind in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
            return StoreError(
                f"{self.location} refuses {name} ({status}): {line}; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
                "and what they may do in this bucket"
            )
        if "redirect" in line:
            return StoreError(f"{self.location} is elsewhere: {line}; set its region: ?region=NAME or AWS_REGION")
        if kind in ("GenericError", "OSError", "TimeoutError") and (
            status is None or status >= 500 or status in (408, 429)
        ):
            return Transient(line)
        return StoreError(f"{self.location} cannot serve {name}: {line}; check the URL and the server")


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].strip()
