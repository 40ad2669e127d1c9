"""A simulated AWS account: run on a host, it creates the stack in the moto server there and prints what it created, as JSON.

`python aws_account.py ENDPOINT TEMPLATE`. From then on the server checks who calls and whether they may. Moto checks the actions
of a policy, but not its conditions and hardly its resources.
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
    """Creates everything that a person sets up once for an account, and what the cloud itself has."""
    session = boto3.Session("admin", "admin", region_name=REGION)
    ec2, iam, sts = (session.client(name, endpoint_url=endpoint) for name in ("ec2", "iam", "sts"))
    session.client("cloudformation", endpoint_url=endpoint).create_stack(
        StackName="compile-sweep",
        TemplateBody=template.read_text(encoding="utf-8"),
        Parameters=[{"ParameterKey": "SshFrom", "ParameterValue": "198.51.100.7/32"}],
        Capabilities=["CAPABILITY_NAMED_IAM"],
    )
    account = sts.get_caller_identity()["Account"]
    documents = {"launcher": [_launchers(iam, account)], "head": _heads(iam)}
    for name, found in documents.items():
        iam.create_user(UserName=name)
        for number, document in enumerate(found):
            iam.put_user_policy(UserName=name, PolicyName=str(number), PolicyDocument=json.dumps(_on_everything(document)))
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


def _launchers(iam: Any, account: str) -> dict[str, Any]:
    arn = f"arn:aws:iam::{account}:policy/compile-sweep-launcher"
    version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
    document: dict[str, Any] = iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"]
    return document


def _heads(iam: Any) -> list[dict[str, Any]]:
    """Returns the policies for a user instead of the role: moto (5.2) cannot read back the text of a role's policies."""
    role = "compile-sweep-head"
    names = iam.list_role_policies(RoleName=role)["PolicyNames"]
    return [literal_eval(iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]) for name in names]


def _on_everything(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the same actions on all resources: moto checks nearly every call for `*`."""
    return {**document, "Statement": [{**statement, "Resource": "*"} for statement in document["Statement"]]}


def environ(credentials: dict[str, Any], endpoint: str) -> dict[str, str]:
    """Returns the variables that make every AWS library call the server with these credentials."""
    return {
        "AWS_ACCESS_KEY_ID": credentials["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": credentials["SecretAccessKey"],
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": REGION,
    }


if __name__ == "__main__":
    print(json.dumps(make(sys.argv[1], Path(sys.argv[2]))))
