"""Administration of a lakehouse's bucket, on boto3: create and check it, its lifecycle rule, links for a limited time.

Data go by obstore (``objects.py``). Server and credentials come from the same variables of the environment.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_api.store import ObjectNotFoundError, StoreFailedError
from polyreme_api.urls import is_bucket, masked
from polyreme_datahub.object_rules import checked_key
from polyreme_datahub.objects import CONNECT_S_MAX, ENDPOINT_VARIABLES, REQUEST_TRIES_MAX, bucket_of, check_endpoints

RULE = "polyreme-abort-unfinished-uploads"
UNFINISHED_DAYS = 7
"""Age at which the server drops the parts of an unfinished upload: they cost money, and no listing shows them."""
READ_S_MAX = 60
LINK_S_MAX = 7 * 24 * 3600
"""Longest life of a link, by the rules of the signature."""
UPLOADS_MAX = 10_000
"""Unfinished uploads that one call drops."""
UNKNOWN = ("NotImplemented", "MethodNotAllowed")
"""What servers without lifecycle rules answer."""
REGION = "us-east-1"
"""What servers other than AWS take for any region."""

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketState:
    """How a bucket is set up."""

    created: bool
    """Whether this call created it."""
    lifecycle: bool
    """Whether its server drops unfinished uploads; some servers know no lifecycle rules."""


def prepare_bucket(url: str, *, environment: Mapping[str, str] | None = None) -> BucketState:
    """Create the bucket of an ``s3://`` URL, unless it exists, and add our lifecycle rule beside those that it has.

    Raises:
        InvalidConfigError: If the URL names no bucket.
        StoreFailedError: If the server can't be reached or refuses.
    """
    bucket, prefix = bucket_of(url)
    with closing(_client(environment)) as client:
        created = _created(client, bucket, url)
        return BucketState(created=created, lifecycle=_lifecycle(client, bucket, prefix, url))


def abort_unfinished_uploads(
    url: str, *, age_s: float, now_s: float, environment: Mapping[str, str] | None = None
) -> int:
    """Drop uploads under a prefix that began longer ago and were never finished; for servers without lifecycle rules.

    Args:
        url: ``s3://bucket/prefix``.
        age_s: Age of those that are dropped [s].
        now_s: The time.
        environment: As this process's own, unless given.

    Returns:
        How many were dropped, at most ``UPLOADS_MAX``.

    Raises:
        StoreFailedError: If the server can't be reached or refuses.
    """
    bucket, prefix = bucket_of(url)
    with closing(_client(environment)) as client:
        pages = client.get_paginator("list_multipart_uploads").paginate(
            Bucket=bucket, Prefix=f"{prefix}/" if prefix else "", PaginationConfig={"MaxItems": UPLOADS_MAX}
        )
        found = _asked(url, lambda: [upload for page in pages for upload in page.get("Uploads", [])]) or []
        old = [upload for upload in found if now_s - upload["Initiated"].timestamp() > age_s]
        for upload in old:
            place = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            # Finished or dropped by another meanwhile: then it is gone, too.
            _asked(url, partial(client.abort_multipart_upload, **place), absent=("NoSuchUpload",))
    return len(old)


def presigned_link(url: str, key: str, *, seconds: int, environment: Mapping[str, str] | None = None) -> str:
    """Return a link by which anyone reads one object for a while, without credentials.

    Args:
        url: ``s3://bucket/prefix``.
        key: Of an object that exists.
        seconds: Life of the link.
        environment: As this process's own, unless given.

    Raises:
        InvalidConfigError: If the URL is no bucket's, or the life is out of range.
        ObjectNotFoundError: If there is no such object.
        StoreFailedError: If the server can't be reached or refuses.
    """
    if not is_bucket(url):
        raise InvalidConfigError(
            f"no link into {masked(url)!r}: only a bucket's server gives links, expected s3://bucket/prefix",
            field="the objects URL",
        )
    if not 1 <= seconds <= LINK_S_MAX:
        raise InvalidConfigError(f"a link can't live {seconds} s, expected 1 to {LINK_S_MAX}", field="seconds")
    bucket, prefix = bucket_of(url)
    place = {"Bucket": bucket, "Key": f"{prefix}/{checked_key(key)}" if prefix else checked_key(key)}
    with closing(_client(environment)) as client:
        if _asked(url, lambda: client.head_object(**place), absent=("404", "NoSuchKey", "NotFound")) is None:
            raise ObjectNotFoundError(f"no object at {key} under {url}")
        link: str = client.generate_presigned_url("get_object", Params=place, ExpiresIn=seconds)
    return link


def _created(client: Any, bucket: str, url: str) -> bool:
    if _asked(url, lambda: client.head_bucket(Bucket=bucket), absent=("404", "NoSuchBucket", "NotFound")) is not None:
        return False
    region = client.meta.region_name
    where = {} if region == REGION else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    # Another process may create it at the same moment: then it is there, which is what was asked.
    both = ("BucketAlreadyOwnedByYou", "BucketAlreadyExists")
    return _asked(url, lambda: client.create_bucket(Bucket=bucket, **where), absent=both) is not None


def _lifecycle(client: Any, bucket: str, prefix: str, url: str) -> bool:
    """Add our rule; rules of others stay."""
    absent = (*UNKNOWN, "NoSuchLifecycleConfiguration")
    found = _asked(url, lambda: client.get_bucket_lifecycle_configuration(Bucket=bucket), absent=absent)
    others = [rule for rule in (found or {}).get("Rules", []) if rule.get("ID") != _rule_id(prefix)]
    ours = {
        "ID": _rule_id(prefix),
        "Status": "Enabled",
        "Filter": {"Prefix": f"{prefix}/" if prefix else ""},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": UNFINISHED_DAYS},
    }
    rules = {"Rules": [*others, ours]}
    put = client.put_bucket_lifecycle_configuration
    return _asked(url, lambda: put(Bucket=bucket, LifecycleConfiguration=rules), absent=UNKNOWN) is not None


def _rule_id(prefix: str) -> str:
    return f"{RULE}-{prefix.replace('/', '-')}" if prefix else RULE


def _asked(url: str, call: Callable[[], _Result], *, absent: tuple[str, ...] = ()) -> _Result | None:
    """Ask the server; return None where it answers one of ``absent``.

    Raises:
        StoreFailedError: If it can't be reached or refuses.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in absent:
            return None
        raise StoreFailedError(
            f"object store {url} refused: {code}: {error.response.get('Error', {}).get('Message', '')}",
            field="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the bucket in the URL",
        ) from error
    except BotoCoreError as error:
        raise StoreFailedError(f"object store {url} can't be reached: {error}", field="AWS_ENDPOINT_URL") from error


def _client(environment: Mapping[str, str] | None) -> Any:
    given = os.environ if environment is None else environment
    check_endpoints(given)
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError as error:
        raise EnvironmentFailedError(
            "the Python module 'boto3' is not installed; install it with pip install '.[services]' in the checkout"
        ) from error
    limits = Config(
        connect_timeout=CONNECT_S_MAX,
        read_timeout=READ_S_MAX,
        retries={"total_max_attempts": REQUEST_TRIES_MAX, "mode": "standard"},
        signature_version="s3v4",
    )
    named = {
        "aws_access_key_id": given.get("AWS_ACCESS_KEY_ID"),
        "aws_secret_access_key": given.get("AWS_SECRET_ACCESS_KEY"),
        "aws_session_token": given.get("AWS_SESSION_TOKEN"),
    }
    return boto3.client(
        "s3",
        endpoint_url=next((given[name] for name in ENDPOINT_VARIABLES if given.get(name)), None),
        region_name=given.get("AWS_REGION") or given.get("AWS_DEFAULT_REGION") or REGION,
        config=limits,
        **{name: value for name, value in named.items() if value},
    )
