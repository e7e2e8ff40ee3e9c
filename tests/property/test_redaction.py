"""Passwords of any characters, quoted or not, in an address of any form: none of them is shown."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlbuffer.store.server.address import has_password, redacted

STRANGE = st.text(st.sampled_from("aZ1@#/?&:=%+ []\\\"'\n\té\u202e*$;|"), min_size=1, max_size=12)
PASSWORDS = st.one_of(STRANGE, st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
FORMS = [
    ("redis://user:{}@host:6379/0", "redis://user:***@host:6379/0"),
    ("rediss://:{}@host", "rediss://:***@host"),
    ("user:{}@host:6379", "user:***@host:6379"),
    (":{}@host", ":***@host"),
    ("redis://user:{}@[::1]:6379/0?ssl_ca_certs=/ca.crt", "redis://user:***@[::1]:6379/0?ssl_ca_certs=/ca.crt"),
    ("redis:user:{}@host", "redis:***@host"),
    ("redis+sentinel://user:{}@h:1,[::1]:2,i/math/0", "redis+sentinel://user:***@h:1,[::1]:2,i/math/0"),
    ("rediss+cluster://user:{}@h:1,[::1]:2,i/0", "rediss+cluster://user:***@h:1,[::1]:2,i/0"),
]
OPTIONS = [
    ("unix:///run/s?db=1&password={}", "unix:///run/s?db=1&password=***"),
    ("unix:///run/s?password={}&db=1", "unix:///run/s?password=***&db=1"),
    ("unix:///run/s?ssl_keyfile=k&ssl_password={}&db=1", "unix:///run/s?ssl_keyfile=k&ssl_password=***&db=1"),
]
SENTINELS = [
    (
        "rediss+sentinel://h:1,h:2/math?sentinel_password={}&sentinel_username=u",
        "rediss+sentinel://h:1,h:2/math?sentinel_password=***&sentinel_username=u",
    ),
    ("redis+sentinel://user:{}", "redis+sentinel://user:***"),
]


def may_stand(password: str) -> bool:
    """It does not itself look like an option of an address."""
    return "pass" not in password.lower()


@pytest.mark.parametrize(("form", "shown"), FORMS)
@settings(deadline=None, max_examples=50)
@given(password=PASSWORDS.filter(may_stand))
@example(password="//secret")
def test_the_password_of_a_user_is_hidden_however_it_is_written(form: str, shown: str, password: str) -> None:
    for written in (password, quote(password, safe="")):
        assert redacted(form.format(written)) == shown
        assert has_password(form.format(written)) or written == "***"


@pytest.mark.parametrize(("form", "shown"), OPTIONS)
@settings(deadline=None, max_examples=50)
@given(password=PASSWORDS.filter(may_stand))
def test_the_password_among_the_options_is_hidden(form: str, shown: str, password: str) -> None:
    for written in (password, quote(password, safe="")):
        assert redacted(form.format(written)) == shown


@pytest.mark.parametrize(("form", "shown"), SENTINELS)
@settings(deadline=None, max_examples=50)
@given(password=PASSWORDS.filter(may_stand))
def test_the_passwords_of_sentinels_are_hidden_when_they_are_quoted(form: str, shown: str, password: str) -> None:
    assert redacted(form.format(f"x{quote(password, safe='')}x")) == shown


@settings(deadline=None, max_examples=50)
@given(password=st.text(st.characters(codec="utf-8"), min_size=1), host=st.sampled_from(["h", "h/0", "h:1/0?db=2"]))
def test_a_password_that_looks_like_an_option_hides_the_rest(password: str, host: str) -> None:
    secret = f"\N{SNOWMAN}{password}?password={password}\N{SNOWMAN}"
    assert "\N{SNOWMAN}" not in redacted(f"redis://user:{secret}@{host}")


@pytest.mark.parametrize("url", ["redis://user:{}", "redis://:{}", "localhost:{}"])
@settings(deadline=None, max_examples=50)
@given(password=PASSWORDS.filter(may_stand))
def test_a_password_without_a_host_is_hidden(url: str, password: str) -> None:
    assert f"x{password}x" not in redacted(url.format(f"x{password}x"))


@pytest.mark.parametrize(
    "url",
    [
        "redis://host:6379/0",
        "redis://user@host",
        "rediss://host/0?ssl_ca_certs=/ca.crt",
        "redis://[::1]:6379",
        "unix:///run/a:b/s.sock?db=1",
        "redis+sentinel://h:1,[::1]:2,i/math/0",
        "memory://name",
        "http://localhost",
        "localhost:6379",
        "",
    ],
)
def test_an_address_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert redacted(url) == url
    assert not has_password(url)
