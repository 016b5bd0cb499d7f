"""Where events come from, as text: ``kafka://...``, ``iceberg:...``, paths.

Worked example::

    kafka://b1:9092,b2:9092/clicks?format=avro&registry=http://registry:8081&group=shop
    kafka://b1:9092/clicks?partitions=0,1&begin=latest&config.security.protocol=SSL
    iceberg:warehouse/db/events          iceberg:warehouse/db/events/metadata/00003-....metadata.json
    iceberg:warehouse/db/events?begin=latest
    logs/    events.csv
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from thinrow.core.errors import InputError
from thinrow.sources.decode import Decoder, JsonDecoder

if TYPE_CHECKING:
    from thinrow.sources.source import Source

_KAFKA, _ICEBERG = "kafka://", "iceberg:"
_OPTIONS = ("begin", "descriptors", "format", "group", "message", "partitions", "registry", "schema")


def is_url(text: str) -> bool:
    """Whether ``text`` is no path."""
    return text.startswith((_KAFKA, _ICEBERG))


def open_source(places: Sequence[str], name: str | None = None, *, follow: bool = False) -> Source:
    """The source at ``places``: one URL, or paths.

    Args:
        name: under which positions are stored; by default topic, table or folder.
        follow: whether it will be read beyond its end.

    Raises:
        InputError: a place is not to be understood, or not there.
        MissingExtraError: what it needs is not installed.
    """
    if any(is_url(p) for p in places):
        if len(places) > 1:
            raise InputError(
                f"{len(places)} sources at once; give one URL, or paths alone, and run one command for each"
            )
        return _kafka(places[0], name) if places[0].startswith(_KAFKA) else _iceberg(places[0], name)
    from thinrow.sources.files import FileSource

    return FileSource(name or str(base_of(places)), list(places), follow=follow)


def base_of(paths: Sequence[str | Path]) -> Path:
    """The folder that all ``paths`` are in, or are."""
    folders = [p if p.is_dir() else p.parent for p in (Path(os.path.abspath(p)) for p in paths)]
    return Path(os.path.commonpath(folders))


def make_decoder(options: Mapping[str, str]) -> Decoder:
    """The decoder that ``format`` and its options name; ``Decoder.describe`` gives such options.

    Raises:
        InputError: an option is missing, or wrong.
    """
    kind, registry = options.get("format", "json"), options.get("registry")
    if kind == "json":
        if registry is None:
            return JsonDecoder()
        from thinrow.sources.registry import FramedJsonDecoder

        return FramedJsonDecoder()
    if kind == "avro":
        from thinrow.sources.registry import AvroDecoder, Registry

        schema = options.get("schema")
        if schema is not None and not schema.lstrip().startswith(("{", "[")):
            schema = Path(schema).read_text()
        return AvroDecoder(None if registry is None else Registry(registry), schema)
    if kind == "protobuf":
        from thinrow.sources.registry import ProtobufDecoder

        if not options.get("message") or not options.get("descriptors"):
            raise InputError("format=protobuf needs message=NAME and descriptors=FILE (of protoc --descriptor_set_out)")
        return ProtobufDecoder(options["message"], options["descriptors"], is_framed=registry is not None)
    raise InputError(f"format {kind!r} is not known; the formats are json, avro, protobuf")


def _kafka(url: str, name: str | None) -> Source:
    from thinrow.sources.kafka import KafkaOptions, KafkaSource

    place, _, query = url.removeprefix(_KAFKA).partition("?")
    brokers, _, topic = place.partition("/")
    if not brokers or not topic or "/" in topic:
        raise InputError(f"{url!r} is no kafka://HOST:PORT/TOPIC?OPTIONS")
    if "@" in brokers:
        raise InputError("a kafka:// URL holds no user; give config.sasl.* settings by a file: config.file=PATH")
    options = dict(parse_qsl(query, keep_blank_values=True))
    config = {k.removeprefix("config."): v for k, v in options.items() if k.startswith("config.")}
    unknown = sorted(k for k in options if k not in _OPTIONS and not k.startswith("config."))
    if unknown:
        raise InputError(f"option {unknown[0]!r} of {url} is not known; known: {', '.join(_OPTIONS)}, config.*")
    if "file" in config:
        config |= _settings(Path(config.pop("file")))
    try:
        partitions = tuple(int(p) for p in options["partitions"].split(",")) if "partitions" in options else ()
    except ValueError as e:
        raise InputError(f"partitions={options['partitions']!r}; write their numbers: partitions=0,1") from e
    kafka = KafkaOptions(
        brokers, topic, options.get("group", "thinrow"), partitions, options.get("begin", "earliest"), config
    )
    return KafkaSource(name or topic, kafka, make_decoder(options))


def _settings(path: Path) -> dict[str, str]:
    """Settings of a file, ``name=value`` a line: what must not stand in a command line."""
    try:
        lines = path.read_text().splitlines()
    except OSError as e:
        raise InputError(f"no file of settings at {path}: {e.strerror}") from e
    pairs = (line.partition("=") for line in lines if line.strip() and not line.startswith("#"))
    return {k.strip(): v.strip() for k, _, v in pairs}


def _iceberg(url: str, name: str | None) -> Source:
    from thinrow.sources.iceberg import IcebergSource

    place, _, query = url.removeprefix(_ICEBERG).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - {"begin"})
    if unknown:
        raise InputError(f"option {unknown[0]!r} of {url} is not known; known: begin")
    return IcebergSource(name or str(Path(os.path.abspath(place))), place, options.get("begin", "earliest"))
