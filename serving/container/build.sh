#!/bin/sh
# Builds the image of Containerfile for a device (cpu or cuda) with the first of docker, podman and buildah that works.
# Exit codes: 0 built, 2 a wrong device or no builder that works, others are the builder's.
set -eu

device="${1:-}"
case "$device" in
  cpu | cuda) ;;
  *) echo "DEVICE is '$device'; it has to be cpu or cuda: make container DEVICE=cpu" >&2; exit 2 ;;
esac

cd "$(dirname "$0")/../.."
version="$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)"
image="pyprune:$version-$device"

missing=""
for builder in docker podman buildah; do
  if ! command -v "$builder" > /dev/null; then
    missing="$missing
  $builder is not installed"
  elif ! "$builder" info > /dev/null 2>&1; then
    missing="$missing
  $builder is installed, but does not work: see what \`$builder info\` prints (often its daemon is not running)"
  else
    echo "Building $image with $builder" >&2
    # Health checks are a part of Docker's image format only, which is not the default of the other two.
    [ "$builder" = docker ] && format="" || format="--format docker"
    # Two words or none.
    # shellcheck disable=SC2086
    DOCKER_BUILDKIT=1 exec "$builder" build $format --file serving/container/Containerfile \
      --build-arg "DEVICE=$device" --tag "$image" .
  fi
done
echo "No container builder works here:$missing
Install one of them, then run make container DEVICE=$device again." >&2
exit 2
