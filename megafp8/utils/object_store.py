"""Objects in S3, Google Cloud Storage and Azure (`s3://`, `gs://`, `az://`, `msc://` names of these) through obstore.

Credentials come from the environment and never appear in a message: the text of a service's error may quote them, so
messages are composed here from its code only. Requests are repeated a bounded number of times and have timeouts. Every
error is an `ObjectError` that names the object.

A URL has a place in the local cache, `local_path`. Code that works on files uses that place, and what it needs is
downloaded to it or uploaded from it.
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional, TypeVar
from urllib.parse import urlsplit

from megafp8.utils.files import (
    AnyPath,
    atomic_write_text,
    file_sha256,
    path_or_url_text,
    publish,
    sync_file,
    temporary_name,
)
from megafp8.utils.installation import pip_install
from megafp8.utils.strict_yaml import read_yaml

SCHEMES = ("s3", "gs", "az")
MSC = "msc"
MSC_SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "az"}  # by the type of an MSC profile's storage_provider
CACHE_VARIABLE = "MEGAFP8_CACHE"
# A request holds this much: an object is read by ranges, and written in parts, of which services allow 10,000.
PART_BYTES, MAX_PARTS = 1 << 24, 9_000
NUM_THREADS = 8
MAX_PAUSE_S = 30.0
ETAG_SUFFIX = ".etag"
T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How long requests are repeated.

    Attributes:
        attempts: of an operation; the pause before the next doubles from `backoff_s` on, up to `MAX_PAUSE_S`.
        timeout_s: of one request.
        request_retries: of one request within an attempt.
    """

    attempts: int = 8
    backoff_s: float = 0.5
    timeout_s: float = 60.0
    request_retries: int = 3


POLICY = RetryPolicy()


class ObjectError(OSError):
    """A failed request. `filename` is the object, `strerror` the reason.

    Attributes:
        number: the `errno`.
        is_permanent: repeating it does not help.
    """

    def __init__(self, number: int, reason: str, url: str, is_permanent: bool = True):
        super().__init__(number, reason, url)
        self.number = number
        self.is_permanent = is_permanent

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"

    @property
    def is_outage(self) -> bool:
        """Whether all attempts failed for a reason that may pass."""
        return self.number == errno.EAGAIN

    @property
    def is_damage(self) -> bool:
        """Whether the content is not what it should be."""
        return self.number == errno.EBADMSG

    def __reduce__(self) -> Any:
        return type(self), (self.number, self.strerror, self.filename, self.is_permanent)


@dataclass(frozen=True)
class ObjectInfo:
    """Size in bytes, the tag that changes with the content, and the time of the last change."""

    num_bytes: int
    etag: str
    mtime_ns: int

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> ObjectInfo:
        """From what obstore says of an object."""
        return cls(found["size"], found["e_tag"] or "", int(found["last_modified"].timestamp() * 1e9))


# ---- names ---------------------------------------------------------------------------------------------------------


def is_url(path: AnyPath) -> bool:
    """Whether a path is the URL of an object or of a folder of objects."""
    return str(path).partition("://")[0] in (*SCHEMES, MSC) and "://" in str(path)


@dataclass(frozen=True)
class Location:
    """A resolved URL, and the address of the service if the environment does not give it."""

    scheme: str
    bucket: str
    key: str
    endpoint: Optional[str] = None

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")


@functools.lru_cache(maxsize=4096)
def parse_url(url: str) -> Location:
    """Parse a URL, and look up a `msc://` name in its profile.

    Raises:
        ObjectError: it is none.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ObjectError(
            errno.EINVAL, "credentials do not belong in a URL; give them in the environment",
            f"{parts.scheme}://...@{parts.netloc.rpartition('@')[2]}",
        )  # fmt: skip
    key = parts.path.strip("/")
    is_plain = not key or not any(name in ("", ".", "..") for name in key.split("/"))
    if not parts.netloc or parts.query or parts.fragment or not is_plain:
        raise ObjectError(errno.EINVAL, "expected SCHEME://BUCKET/NAME, without //, .., ? and # in the name", url)
    if parts.scheme == MSC:
        return _msc_location(parts.netloc, key, url)
    if parts.scheme not in SCHEMES:
        raise ObjectError(errno.EINVAL, f"the scheme must be {', '.join(SCHEMES)} or {MSC}", url)
    return Location(parts.scheme, parts.netloc, key)


def _msc_location(profile: str, key: str, url: str) -> Location:
    """Look up a profile of NVIDIA's Multi-Storage Client: type, base path and endpoint of its storage provider."""
    path = Path(os.environ.get("MSC_CONFIG") or Path.home() / ".msc_config.yaml")
    if not path.is_file():
        text = f"{path} does not exist; set MSC_CONFIG to the file with the profile {profile}, or give an s3:// URL"
        raise ObjectError(errno.ENOENT, text, url)
    try:
        found = (read_yaml(path).get("profiles") or {}).get(profile)
        if found is None:
            raise ValueError(f"no profile {profile}")
        provider = found["storage_provider"]
        kind, options = provider["type"], provider.get("options") or {}
        if kind not in MSC_SCHEMES:
            raise ValueError(f"the type of profile {profile} is {kind}, supported are {', '.join(MSC_SCHEMES)}")
        if "credentials_provider" in found:
            raise ValueError(f"profile {profile} has a credentials_provider; give credentials in the environment")
        base = str(options.get("base_path") or "").strip("/")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ObjectError(errno.EINVAL, f"{path}: {error}", url) from error
    bucket, _, folder = f"{base}/{key}".strip("/").partition("/")
    return Location(MSC_SCHEMES[kind], bucket, folder.strip("/"), options.get("endpoint_url"))


def cache_root() -> Path:
    """The folder of the local cache: MEGAFP8_CACHE, by default ~/.cache/megafp8."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megafp8"


def local_path(path: AnyPath) -> Path:
    """Return the place of a URL in the local cache; any other path as it is.

    Raises:
        ObjectError: it is no valid URL.
    """
    if not is_url(path):
        return Path(path)
    parse_url(str(path))
    # A name of the Multi-Storage Client keeps its profile, which may have the address of the service.
    scheme, _, rest = str(path).partition("://")
    return cache_root() / scheme / rest.strip("/")


def url_of(path: AnyPath) -> Optional[str]:
    """Return the URL whose place in the local cache a path is; None for any other path."""
    try:
        scheme, *names = Path(path).relative_to(cache_root()).parts
    except ValueError:
        return None
    return f"{scheme}://{'/'.join(names)}" if scheme in (*SCHEMES, MSC) and names else None


# ---- objects -------------------------------------------------------------------------------------------------------


class ObjectFolder:
    """The objects below a URL; their names are relative to it.

    Args:
        address: URL of the folder.

    Attributes:
        address: opens the same folder in another process.
        url: the same with the bucket of a `msc://` profile, whose address of the service it lacks.

    Raises:
        ObjectError: no valid URL, or obstore is not installed.
    """

    def __init__(self, address: str):
        self.address, self._place = address, parse_url(address)
        self.url = str(self._place)
        self._store = _open_store(self._place)

    def __str__(self) -> str:
        return self.url

    def name_of(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def _call(self, name: str, action: Callable[[], T]) -> T:
        """Call until it succeeds, at most as often as the policy allows."""
        for attempt in range(POLICY.attempts):
            try:
                return action()
            except Exception as raised:
                error = _explain(raised, self.name_of(name))
            if error.is_permanent:
                break
            if attempt + 1 < POLICY.attempts:
                time.sleep(min(MAX_PAUSE_S, POLICY.backoff_s * 2**attempt))
        if not error.is_permanent:
            error = ObjectError(
                error.number if error.is_damage else errno.EAGAIN,
                f"{error.strerror}, {POLICY.attempts} attempts failed", error.filename,
            )  # fmt: skip
        # Without the cause: the service's text may quote the access key or a signature.
        raise error from None

    def info(self, name: str) -> Optional[ObjectInfo]:
        """Size and tag of an object; None if it does not exist."""
        import obstore

        try:
            found = self._call(name, lambda: obstore.head(self._store, name))
        except ObjectError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return ObjectInfo.of(found)

    def find(self, folder: str = "", is_deep: bool = True) -> dict[str, ObjectInfo]:
        """The objects in a folder, by name; with `is_deep` also those in folders in it."""
        import obstore

        def request() -> dict[str, ObjectInfo]:
            if is_deep:
                found = [each for chunk in obstore.list(self._store, folder or None) for each in chunk]
            else:
                found = list(obstore.list_with_delimiter(self._store, folder or None)["objects"])
            return {each["path"]: ObjectInfo.of(each) for each in found}

        return self._call(folder, request)

    def read_range(self, name: str, first: int, num_bytes: int, etag: str = "") -> bytes:
        """Read bytes of an object.

        Args:
            etag: that the object must have; empty accepts any.

        Raises:
            ObjectError: also if it ends before, or has changed.
        """
        import obstore

        def request() -> bytes:
            options: Any = {"range": (first, first + num_bytes)}
            if etag:
                options["if_match"] = etag
            content = obstore.get(self._store, name, options=options).bytes().to_bytes()
            if len(content) != num_bytes:
                text = f"truncated: bytes {first} to {first + num_bytes} came as {len(content)} bytes"
                raise ObjectError(errno.EIO, text, self.name_of(name), is_permanent=False)
            return content

        return self._call(name, request) if num_bytes else b""

    def read_ranges(self, name: str, starts: Iterable[int], num_bytes: int, etag: str = "") -> list[bytes]:
        """Read several ranges of the same size, some of them at the same time."""
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return list(pool.map(lambda first: self.read_range(name, first, num_bytes, etag), starts))

    def read(self, name: str) -> bytes:
        """Read a small object."""
        info = self._existing(name)
        return self.read_range(name, 0, info.num_bytes, info.etag)

    def download(self, name: str, path: Path, sha256: Optional[str] = None, info: Optional[ObjectInfo] = None) -> None:
        """Download an object. The file is complete or absent, also for other processes.

        Args:
            sha256: of the content, if known.
            info: of the object, if known.

        Raises:
            ObjectError: also if the content has another hash.
        """
        info = info or self._existing(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)

        def request() -> None:
            with open(temporary, "wb") as stream, ThreadPoolExecutor(NUM_THREADS) as pool:
                stream.truncate(info.num_bytes)

                def copy(first: int) -> None:
                    content = self.read_range(name, first, min(PART_BYTES, info.num_bytes - first), info.etag)
                    os.pwrite(stream.fileno(), content, first)

                list(pool.map(copy, range(0, info.num_bytes, PART_BYTES)))
            sync_file(temporary)
            if sha256 is not None and (found := file_sha256(temporary)) != sha256:
                text = f"damaged: SHA-256 {found[:12]}... instead of {sha256[:12]}..."
                raise ObjectError(errno.EBADMSG, text, self.name_of(name), is_permanent=False)

        try:
            self._call(name, request)
            publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _existing(self, name: str) -> ObjectInfo:
        info = self.info(name)
        if info is None:
            raise ObjectError(errno.ENOENT, "no such object", self.name_of(name))
        return info

    def write(self, name: str, content: bytes) -> None:
        """Write a small object; readers see the old or the new content."""
        import obstore

        self._call(name, lambda: obstore.put(self._store, name, content, use_multipart=False))

    def upload(self, path: Path, name: str) -> None:
        """Upload a file, a large one in parts. The object is complete or as it was."""
        import obstore

        num_bytes = path.stat().st_size

        def request() -> None:
            if num_bytes == 0:
                obstore.put(self._store, name, b"", use_multipart=False)
                return
            part = max(PART_BYTES, -(-num_bytes // MAX_PARTS))
            obstore.put(self._store, name, path, chunk_size=part, max_concurrency=NUM_THREADS)

        self._call(name, request)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, in this order; those that do not exist are ignored."""
        import obstore

        for name in names:
            try:
                self._call(name, lambda: obstore.delete(self._store, name))  # noqa: B023  called at once
            except ObjectError as error:
                if error.errno != errno.ENOENT:
                    raise

    def rename(self, name: str, new_name: str) -> None:
        """Copy an object to another name, and delete the first."""
        import obstore

        self._call(name, lambda: obstore.copy(self._store, name, new_name))
        self.delete([name])


@functools.cache
def _first_user() -> int:
    """The process that opened the first store. Its forked children know it, too."""
    return os.getpid()


def is_usable() -> bool:
    """Whether this process can use obstore: its threads do not exist in a child that its user forks."""
    return _first_user() == os.getpid()


@functools.lru_cache(maxsize=256)
def listed_folder(url: str) -> tuple[ObjectFolder, dict[str, ObjectInfo]]:
    """A folder and its objects, without those in folders in it; a process looks them up once."""
    folder = ObjectFolder(url)
    return folder, folder.find(is_deep=False)


def _open_store(place: Location) -> Any:
    if not is_usable():
        raise ObjectError(errno.EBUSY, "not available in a process forked from one that uses it", str(place))
    try:
        from obstore.store import from_url
    except ModuleNotFoundError as error:
        raise ObjectError(
            errno.ENOPKG, f"object storage needs obstore: {pip_install('storage')}", str(place)
        ) from error
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
    endpoint = place.endpoint or next((value for name in variables if (value := os.environ.get(name))), "")
    options: dict[str, Any] = {"timeout": timedelta(seconds=POLICY.timeout_s), "connect_timeout": timedelta(seconds=10)}
    if endpoint.startswith("http://"):
        options["allow_http"] = True  # a server of the user's own, such as MinIO
    backoff = {
        "init_backoff": timedelta(seconds=POLICY.backoff_s / 5), "max_backoff": timedelta(seconds=10), "base": 2,
    }  # fmt: skip
    retries = {
        "max_retries": POLICY.request_retries, "retry_timeout": timedelta(seconds=2 * POLICY.timeout_s),
        "backoff": backoff,
    }  # fmt: skip
    extra: Mapping[str, Any] = {"config": {"endpoint": place.endpoint}} if place.endpoint else {}
    try:
        return from_url(str(place), client_options=options, retry_config=retries, **extra)  # type: ignore[call-overload]
    except Exception as raised:
        text = f"the store cannot be opened ({type(raised).__name__}): check the URL and the environment's settings"
        raise ObjectError(errno.EINVAL, text, str(place)) from None


_STATUS, _CODE = re.compile(r"status code: (\d{3})"), re.compile(r"<Code>(\w+)</Code>")
_CLOCK_CODES = {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
_KEY_CODES = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AuthenticationFailed"}
_METADATA_SERVICES = ("169.254.169.254", "metadata.google.internal")


def _explain(error: Exception, url: str) -> ObjectError:
    """Return the error of a request as one of this module, without the service's text."""
    if isinstance(error, ObjectError):
        return error
    if isinstance(error, OSError) and error.errno is not None:  # of a local file
        return ObjectError(error.errno, f"{error.filename}: {error.strerror}", url)
    text = str(error)
    status, code = (match[1] if (match := pattern.search(text)) else "" for pattern in (_STATUS, _CODE))
    found = f" ({code})" if code else ""
    if code in _CLOCK_CODES:
        return ObjectError(errno.EACCES, f"refused{found}: the clock of this machine is wrong; set it", url)
    if code in _KEY_CODES:
        return ObjectError(errno.EACCES, f"the credentials of the environment are not accepted{found}", url)
    if any(name in text for name in _METADATA_SERVICES):
        return ObjectError(errno.EACCES, "no credentials: set them in the environment (AWS_ACCESS_KEY_ID, ...)", url)
    if code == "NoSuchBucket":
        return ObjectError(errno.ENXIO, "no such bucket", url)
    if status == "404" or isinstance(error, FileNotFoundError):
        return ObjectError(errno.ENOENT, "no such object", url)
    if status in ("401", "403"):
        text = f"access is denied{found}: the credentials of the environment do not allow it, or there are none"
        return ObjectError(errno.EACCES, text, url)
    if status == "412" or type(error).__name__ == "PreconditionError":
        return ObjectError(errno.ESTALE, "it was replaced while it was read; give new data new names", url)
    if status.startswith("4") and status not in ("408", "429"):
        return ObjectError(errno.EINVAL, f"the service refuses the request: status {status}{found}", url)
    if status:
        return ObjectError(errno.EIO, f"the service fails: status {status}{found}", url, is_permanent=False)
    reasons = {"timed out|TimedOut|timeout:": "timeout", "refused": "connection refused", "dns": "unknown host"}
    reason = next((words for pattern, words in reasons.items() if re.search(pattern, text)), "the connection failed")
    return ObjectError(errno.EIO, reason, url, is_permanent=False)


# ---- copies in the cache -------------------------------------------------------------------------------------------


def fetch(folder: ObjectFolder, name: str, path: Path, info: Optional[ObjectInfo] = None) -> None:
    """Download an object unless the file is a copy of its present content, which a file beside it records.

    Raises:
        ObjectError: see `ObjectFolder.download`.
    """
    info = info or folder._existing(name)
    record = path.with_name(f".{path.name}{ETAG_SUFFIX}")
    stamp = f"{info.num_bytes} {info.etag}"
    if path.is_file() and path.stat().st_size == info.num_bytes and record.is_file() and record.read_text() == stamp:
        return
    record.unlink(missing_ok=True)
    folder.download(name, path, info=info)
    os.utime(path, ns=(info.mtime_ns, info.mtime_ns))
    atomic_write_text(record, stamp)


def place_argument(text: str) -> Path:
    """argparse `type` of a folder or its URL, which becomes its place in the local cache.

    Raises:
        argparse.ArgumentTypeError: an invalid path or URL.
    """
    try:
        return local_path(path_or_url_text(text))
    except ObjectError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
