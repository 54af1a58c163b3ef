#!/bin/sh
# Certificates for the machines of a Ray cluster, for RAY_USE_TLS: an authority, and a certificate for each machine.
#
#     sh scripts/ray_certificates.sh FOLDER HOST...      HOST is the address or the name by which Ray knows a machine
#
# It may be run again for more machines: the authority that is there is used. ca.key signs, so keep it to yourself; each
# machine gets ca.pem and its own HOST.pem and HOST.key.
set -eu
[ $# -ge 2 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$1
shift
umask 077
mkdir -p "$folder"
cd "$folder"
DAYS=825

key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

if ! [ -f ca.key ]; then
    key ca.key
    openssl req -x509 -new -key ca.key -sha256 -days "$DAYS" -subj "/CN=Ray cluster" -out ca.pem \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi
for host; do
    case $host in
        *[!0-9.]*) case $host in *:*) name="IP:$host" ;; *) name="DNS:$host" ;; esac ;;
        *) name="IP:$host" ;;
    esac
    key "$host.key"
    # Every machine is a server and a client, and speaks with its own processes over loopback.
    printf '%s\n' "subjectAltName=$name,IP:127.0.0.1,DNS:localhost" "extendedKeyUsage=serverAuth,clientAuth" \
        "basicConstraints=critical,CA:FALSE" >"$host.ext"
    openssl req -new -key "$host.key" -subj "/CN=$host" |
        openssl x509 -req -CA ca.pem -CAkey ca.key -CAcreateserial -sha256 -days "$DAYS" -extfile "$host.ext" \
            -out "$host.pem" 2>/dev/null
    rm "$host.ext"
done
