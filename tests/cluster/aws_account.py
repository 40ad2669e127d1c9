"""A pretended AWS account: run on a host, it makes the stack in the moto server there and says what it made, as JSON.

`python aws_account.py ENDPOINT TEMPLATE`. From then on the server asks who calls and what they may do; moto knows actions and
resources of a policy, not its conditions.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from ast import literal_eval
from pathlib import Path
from typing import Any

import boto3

REGION = "us-west-2"
KEY = f"ray-autoscaler_{REGION}"


def make(endpoint: str, template: Path) -> dict[str, Any]:
    """Everything that a person makes once for an account, and what the cloud itself has."""
    session = boto3.Session("admin", "admin", region_name=REGION)
    ec2, iam, sts = (session.client(name, endpoint_url=endpoint) for name in ("ec2", "iam", "sts"))
    session.client("cloudformation", endpoint_url=endpoint).create_stack(
        StackName="compile-sweep",
        TemplateBody=template.read_text(encoding="utf-8"),
        Parameters=[{"ParameterKey": "SshFrom", "ParameterValue": "198.51.100.7/32"}],
        Capabilities=["CAPABILITY_NAMED_IAM"],
    )
    account = sts.get_caller_identity()["Account"]
    for name in ("launcher", "head"):
        iam.create_user(UserName=name)
    iam.attach_user_policy(UserName="launcher", PolicyArn=f"arn:aws:iam::{account}:policy/compile-sweep-launcher")
    role = "compile-sweep-head"
    for name in iam.list_role_policies(RoleName=role)["PolicyNames"]:  # moto (5.2) stumbles over those of an assumed role,
        document = iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
        iam.put_user_policy(UserName="head", PolicyName=name, PolicyDocument=json.dumps(literal_eval(document)))  # and of a stack
    launcher, head = (iam.create_access_key(UserName=name)["AccessKey"] for name in ("launcher", "head"))
    made = {
        "account": account,
        "image": ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"],
        "key": ec2.create_key_pair(KeyName=KEY)["KeyMaterial"],
        "launcher": environ(launcher, endpoint),
        "head": environ(head, endpoint),
    }
    plain = {"Content-Type": "text/plain"}
    from_now_on = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", data=b"0", headers=plain, method="POST")
    urllib.request.urlopen(from_now_on, timeout=60).close()
    return made


def environ(credentials: dict[str, Any], endpoint: str) -> dict[str, str]:
    """What makes every AWS library call the server as somebody."""
    return {
        "AWS_ACCESS_KEY_ID": credentials["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": credentials["SecretAccessKey"],
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": REGION,
    }


if __name__ == "__main__":
    print(json.dumps(make(sys.argv[1], Path(sys.argv[2]))))
