// Command certificate writes what a test control plane needs before its API server starts, into the folder that its
// argument names: a TLS certificate for loopback with its authority appended, its key, and the key of service accounts.
package main

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"log"
	"net"
	"os"
	"path/filepath"

	"k8s.io/client-go/util/cert"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: certificate FOLDER")
	}
	certificate, key, err := cert.GenerateSelfSignedCertKey("localhost", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		log.Fatal(err)
	}
	accounts, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		log.Fatal(err)
	}
	block := &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(accounts)}
	for name, content := range map[string][]byte{
		"server.crt":   certificate,
		"server.key":   key,
		"accounts.key": pem.EncodeToMemory(block),
	} {
		if err := os.WriteFile(filepath.Join(os.Args[1], name), content, 0o600); err != nil {
			log.Fatal(err)
		}
	}
}
