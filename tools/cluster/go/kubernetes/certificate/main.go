// Command certificate writes what a test control plane needs before its API server starts, into the folder that its
// first argument names: a TLS certificate for loopback with its authority appended, its key, and the key of service
// accounts; and the certificate by which kubelets know the API server, with its key. Further arguments are addresses
// and names that the TLS certificate is for as well.
package main

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/util/cert"
)

const lifetime = 365 * 24 * time.Hour

func main() {
	if len(os.Args) < 2 {
		log.Fatal("usage: certificate FOLDER [ADDRESS|NAME]...")
	}
	addresses, names := []net.IP{net.IPv4(127, 0, 0, 1)}, []string{}
	for _, each := range os.Args[2:] {
		if address := net.ParseIP(each); address != nil {
			addresses = append(addresses, address)
		} else {
			names = append(names, each)
		}
	}
	certificate, key, err := cert.GenerateSelfSignedCertKey("localhost", addresses, names)
	if err != nil {
		log.Fatal(err)
	}
	client, clientKey := clientCertificate()
	for name, content := range map[string][]byte{
		"server.crt":         certificate,
		"server.key":         key,
		"kubelet-client.crt": client,
		"kubelet-client.key": encode(clientKey),
		"accounts.key":       encode(newKey()),
	} {
		if err := os.WriteFile(filepath.Join(os.Args[1], name), content, 0o600); err != nil {
			log.Fatal(err)
		}
	}
}

// clientCertificate returns a certificate that is its own authority: whoever trusts it trusts its owner alone.
func clientCertificate() ([]byte, *rsa.PrivateKey) {
	key, now := newKey(), time.Now()
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "kube-apiserver"},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(lifetime),
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	content, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		log.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: content}), key
}

func newKey() *rsa.PrivateKey {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		log.Fatal(err)
	}
	return key
}

func encode(key *rsa.PrivateKey) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
}
