import pytest

from lightppo.config.address import check_bind, check_url, is_loopback


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "192.0.2.1", "no.such.name.invalid")))
    check_bind("0.0.0.0", has_token=True)
    for host in ("", "0.0.0.0", "::"):
        with pytest.raises(ValueError, match="--token_env"):
            check_bind(host, has_token=False)
    with pytest.raises(ValueError, match="--api_key_env NAME"):
        check_bind("0.0.0.0", has_token=False, token_option="--api_key_env")


def test_an_address_is_refused_by_the_flag_that_it_came_from() -> None:
    check_url("http://127.0.0.1:8000", "--vllm_server_url")
    with pytest.raises(ValueError, match=r"--vllm_server_url: 'ftp://host/x' is not an http\(s\) address"):
        check_url("ftp://host/x", "--vllm_server_url")
    with pytest.raises(ValueError, match="--a: a URL has a user or password in it; use --b instead") as caught:
        check_url("http://me:hunter2@host", "--a", "--b")
    assert "hunter2" not in str(caught.value)
