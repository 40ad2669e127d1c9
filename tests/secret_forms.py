"""Secrets in the forms in which services, programs and people write them, made up anew, and text that must stay as it is."""

from __future__ import annotations

import random
import string

HEX = "0123456789abcdef"
UPPER = string.ascii_uppercase + "234567"
ALL = string.ascii_letters + string.digits

FORMS = {
    "aws": [("AKIA", 16, UPPER, ""), ("ASIA", 16, UPPER, ""), ("ABIA", 16, UPPER, ""), ("ABSK", 120, ALL, "==")],
    "bedrock": [("bedrock-api-key-", 60, ALL, "")],
    "github": [("ghp_", 36, ALL, ""), ("ghs_", 36, ALL, ""), ("github_pat_", 82, ALL, "")],
    "gitlab": [
        *((f"gl{kind}-", 20, ALL, "") for kind in ("pat", "dt", "rt", "ft", "soat", "ffct")),
        *(("glptt-", 40, HEX, ""), ("glcbt-1f_", 20, ALL, ""), ("GR1348941", 20, ALL, ""), ("_gitlab_session=", 32, HEX, "")),
    ],
    "slack": [
        *(("xoxb-123456789012-123456789012-", 24, ALL, ""), ("xoxe.xoxb-1-", 163, UPPER, ""), ("xapp-1-A1-", 20, ALL, "")),
        *(("https://hooks.slack.com/workflows/T0/", 40, ALL, ""), ("hooks.slack.com/services/T01/B01/", 24, ALL, "")),
    ],
    "google": [("AIza", 35, ALL, ""), ("ya29.", 60, ALL, ""), ("GOCSPX-", 28, ALL, ""), ("x-goog-api-key: ", 39, ALL, "")],
    "models": [
        *(("hf_", 34, ALL, ""), ("api_org_", 34, ALL, ""), ("sk-", 48, ALL, ""), ("sk-proj-", 74, ALL, "")),
        *(("sk-ant-api03-", 93, ALL, "AA"), ("pplx-", 48, ALL, ""), ("gsk_", 52, ALL, ""), ("xai-", 80, ALL, "")),
        *(
            ("csk-", 48, ALL, ""),
            ("tgp_v1_", 43, ALL, ""),
            ("lsv2_pt_", 32, HEX, ""),
            ("r8_", 37, ALL, ""),
            ("rpa_", 40, ALL, ""),
        ),
        *(("nvapi-", 64, ALL, ""), ("fw_1aB", 21, ALL, ""), ("ak-1aB", 19, ALL, "")),
    ],
    "azure": [
        ("DefaultEndpointsProtocol=https;AccountName=x;AccountKey=", 86, ALL, "==;EndpointSuffix=core.windows.net"),
        ("Endpoint=sb://x.servicebus.windows.net/;SharedAccessKeyName=Root;SharedAccessKey=", 43, ALL, "="),
        *(
            ("a1b8Q~", 34, ALL, ""),
            ("SharedAccessSignature=sv=2020&sig=", 44, ALL, ""),
            ("Ocp-Apim-Subscription-Key: ", 32, HEX, ""),
        ),
    ],
    "databricks": [("dapi", 32, HEX, ""), ("dapi", 32, HEX, "-2")],
    "messages": [
        *(("SG.abcdefghijklmnopqrstuv.", 43, ALL, ""), ("AC", 32, HEX, ""), ("SK", 32, HEX, ""), ("account_sid=AC", 32, HEX, "")),
        *(("M1abcdefghijklmnopqrstuv.Gabcde.1A", 36, ALL, ""), ("https://discord.com/api/v10/webhooks/12/", 60, ALL, "")),
        *(("123456789:AA", 33, ALL, ""), ("https://api.telegram.org/bot123456789:AA", 33, ALL, "/send"), ("key-", 32, HEX, "")),
    ],
    "private keys": [
        *(
            (f"-----BEGIN {kind}-----\n", 64, ALL, f"\n-----END {kind}-----")
            for kind in ("RSA PRIVATE KEY", "PGP PRIVATE KEY BLOCK")
        ),
        *(("-----BEGIN OPENSSH PRIVATE KEY-----\n", 64, ALL, ""), ("AGE-SECRET-KEY-1", 58, UPPER, "")),
    ],
    "logins": [
        *(
            ("https://me:", 20, ALL, "@host/x"),
            ("curl -u me:", 20, ALL, " https://x"),
            ("curl --user me:", 20, ALL, " https://x"),
        ),
        *(("wandb login 1a", 38, HEX, ""), ("wandb login --relogin 1a", 38, HEX, ""), ('wandb.login(key="1a', 38, HEX, '")')),
        *(("huggingface-cli login --token hf_", 34, ALL, ""), ("docker login -u me -p ", 20, ALL, " registry.example")),
        *(("machine api.wandb.ai login user password 1a", 38, HEX, ""), ("mysql -uroot -p", 16, ALL, " db")),
        *(("sshpass -p ", 12, ALL, " ssh x"), ("requirepass 1a", 20, ALL, ""), ("mongodb+srv://me:", 16, ALL, "@c.mongodb.net")),
    ],
    "headers": [
        *(
            ("Authorization: Basic ", 30, ALL, ""),
            ("Authorization: token ", 40, HEX, ""),
            ("Authorization: ApiKey 1a", 30, ALL, ""),
        ),
        *(('Authorization: Digest username="me", response="', 32, HEX, '"'), ("Proxy-Authorization: Basic ", 30, ALL, "")),
        ("Authorization: AWS4-HMAC-SHA256 Credential=x/2020, Signature=", 64, HEX, ""),
        *(("{'Authorization': 'Bearer ", 40, ALL, "'}"), ("(b'authorization', b'Bearer ", 40, ALL, "')")),
        *(("X-Auth-Token: 1a", 32, ALL, ""), ("Cookie: a=b; sessionid=", 32, ALL, ""), ("Set-Cookie: sid=", 32, ALL, "; Path=/")),
    ],
    "addresses": [
        *(("https://x/cb?code=1a", 30, ALL, ""), ("/cb?state=1&code=1a", 30, ALL, "&x=1"), ("x?id_token=", 30, ALL, "")),
        *(
            ("?X-Amz-Signature=", 64, HEX, ""),
            ("?PHPSESSID=", 26, ALL, ""),
            ("?pw=", 12, ALL, ""),
            ("password%3D1a", 16, ALL, ""),
        ),
    ],
    "packages": [
        *(("npm_", 36, ALL, ""), ("pypi-AgEIcHlwaS5vcmc", 60, ALL, ""), ("dckr_pat_", 27, ALL, ""), ("rubygems_", 48, HEX, "")),
        *(("//registry.example/:_authToken=1a", 36, ALL, ""), ("_auth=1a", 36, ALL, "=="), ("AKCp", 69, ALL, "")),
    ],
    "others": [
        *(
            ("sk_live_", 24, ALL, ""),
            ("whsec_", 32, ALL, ""),
            ("sq0atp-", 22, ALL, ""),
            ("shpat_", 32, HEX, ""),
            ("hvs.", 95, ALL, ""),
        ),
        *(("HRKU-AA", 58, ALL, ""), ("dp.pt.", 43, ALL, ""), ("glsa_", 32, ALL, "_0a1b2c3d"), ("lin_api_", 40, ALL, "")),
        *(
            ("ntn_", 46, ALL, ""),
            ("pscale_tkn_", 43, ALL, ""),
            ("sntryu_", 64, HEX, ""),
            ("abcdefghijklmn.atlasv1.", 64, ALL, ""),
        ),
        *(
            ("tskey-auth-", 30, ALL, ""),
            ("sbp_", 40, HEX, ""),
            ("NRAK-", 27, UPPER, ""),
            ("dop_v1_", 64, HEX, ""),
            ("LTAI", 20, ALL, ""),
        ),
        ("eyJhbGciOiJIUzI1NiJ9.eyJhIjox.", 43, ALL, ""),
    ],
    "names": [
        *((f"{name}=1a", 14, ALL, "") for name in ("DB_PWD", "MY_TOKEN", "FOO_SECRET", "X_API_KEY", "ENCRYPTION_KEY", "APP_KEY")),
        *((f"{name}=", 10, string.ascii_letters, "") for name in ("PASSWORD", "PGPASSWORD", "DB_PASS", "WANDB_API_KEY")),
        *(('"client_secret": "1a', 30, ALL, '"'), ("db_password: 1a", 12, ALL, ""), ('api_key := "1a', 20, ALL, '"')),
        *(("<password>", 12, ALL, "</password>"), ('<add key="ClearTextPassword" value="', 12, ALL, '" />')),
        *(("environ({'MY_SECRET': '1a", 20, ALL, "', 'HOME': '/root'})"), ("connect(password='", 10, ALL, "')")),
        *(('{\\"api_key\\": \\"1a', 20, ALL, '\\"}'), ('["--api-key", "', 20, ALL, '"]'), ("token is 1a", 40, HEX, "")),
        *(
            ('{"auths": {"x": {"auth": "1a', 30, ALL, '=="}}}'),
            ("The password is 1a", 14, ALL, ""),
            ("client-key-data: 1a", 80, ALL, ""),
        ),
    ],
}
"""By kind: what stands before the secret, its length and letters, and what stands behind it."""


def made_up(seed: int) -> dict[str, tuple[str, str]]:
    """Returns texts that hold a secret, and the secret in each, by kind and number."""
    dice = random.Random(seed)
    made = {}
    for kind, forms in FORMS.items():
        for number, (before, length, letters, after) in enumerate(forms):
            secret = "".join(dice.choices(letters, k=length))
            made[f"{kind} {number}"] = (f"{before}{secret}{after}", secret)
    return made


ORDINARY = [
    *(
        "scope=full,mode=max-autotune,cudagraphs=true",
        "settings_key: scope=full,dynamic=auto",
        "key=scope=full",
        "A12",
        "001-1f2e3d",
    ),
    *(
        "/home/ann/.cache/inductor/ab/cdefghijk123.py",
        "commit 8c805ba1d2e3f4a5b6c7d8e9f0a1b2c3d4e5f6a7",
        f"md5 {'4b2' * 10}",
    ),
    *(f"sha256:{'0a1b' * 16}", f"node_id={'0a1b' * 14}", "uuid 123e4567-e89b-12d3-a456-426614174000", f"sha1-{'9f8e7' * 8}"),
    *("torch.Size([32, 1024, 50257])", "tensor([[0, 1]], dtype=torch.float32)", "x.weight: torch.float32[1024, 4096]"),
    *(
        "DynamicCache(layers=2)",
        "Actor(ProgressActor, 0a1b2c3d4e5f60718293a4b5)",
        'GPT2Config { "n_head": 12, "pad_token_id": 50256 }',
    ),
    *("key_padding_mask=None", "tokens_per_s=12345.6", "max_new_tokens: 128", "pad_token_id=50256", 'eos_token="<|endoftext|>"'),
    *("tokenizer: AutoTokenizer.from_pretrained('gpt2')", "--tokenizer gpt2-xl", "--key-dim 128", "--max-tokens-per-batch 16384"),
    *(
        "exit code=3",
        "?code=3",
        "?code=scope2full",
        "cache key: fo4gdz7xkqy2mwkq",
        "cache_key=fx_graph_abc123",
        "KeyError: 'layer1'",
    ),
    *(
        "session=3",
        "session_2026-11-27_10-00-00_123456_789",
        "RAY_AUTH_MODE=token RAY_enable_autoscaler_v2=0",
        "PWD=/home/ann/project2/x",
    ),
    *("triton_poi_fused_add_0", "cutlass_80_tensorop_f16_s16816gemm_f16_128x64_32x6_nn_align8", "NVIDIA H200 sm_90a", "v1.0-rc1"),
    *("https://pytorch.org/docs/stable/x.html?highlight=compile#torch.compile", "http://127.0.0.1:8265/?size=tiny", "r8_unorm"),
    *(
        "s3://bucket/sweeps/2026-11-27T10:00:00",
        "redis://host:6379",
        "file:///tmp/a@b",
        "hf_hub_download",
        "fp8_e4m3fn",
        "AC milan",
    ),
    *("the password of the store", "Authorization failed", "HF_TOKEN is not set", "api_key is not set", "passed=12", "pass=1/3"),
    *(
        "torch==2.13.0+cu126",
        "curl -u https://x",
        "mysql is slow -p",
        "docker login failed",
        "secret_santa",
        "PASSWORD=None",
        "auth=none",
    ),
    *(
        "password=getpass.getpass()",
        "token = tokenizer2.encode(text)",
        "POSTGRES_PASSWORD=$PASSWORD",
        "TOKEN_FILE=/run/secrets/token1",
    ),
]
"""What is no secret, though parts of it may look alike."""
