"""Make buckets that do not exist yet in the object store of AWS_ENDPOINT_URL: `python make_buckets.py NAME ...`."""

import sys

import boto3
from botocore.exceptions import ClientError

if __name__ == "__main__":
    client = boto3.client("s3")
    there = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    for name in sys.argv[1:]:
        if name in there:
            print(f"{name} is there")
            continue
        try:
            client.create_bucket(Bucket=name)
        except ClientError as error:
            sys.exit(f"bucket {name} cannot be made: {error}")
        print(f"{name} made")
