//! TLS: connections that have shaken hands, as a listener of their own.
//!
//! A client that is slow to shake hands, or never does, keeps nobody else waiting.

use super::run::ServeError;
use axum::serve::Listener;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// How long a client may take to shake hands.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Handshakes at the same time; further connections wait in the system's queue. Those who never speak must be very many to
/// keep others waiting.
const MAX_HANDSHAKES: usize = 4096;

/// What a TLS server is known by, in PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, followed by those of its issuers.
    pub certificates: PathBuf,
    pub key: PathBuf,
}

/// Connections over TLS.
pub struct TlsListener {
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    address: std::io::Result<SocketAddr>,
}

/// Reads the files; the error names the one that is wrong.
pub fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, ServeError> {
    let fault = |path: &Path, fault: String| ServeError::Tls { path: path.to_path_buf(), fault };
    let read = |path: &Path| std::fs::read(path).map_err(|e| fault(path, e.to_string()));
    let (chain, key) = (read(&files.certificates)?, read(&files.key)?);
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&chain)
        .collect::<Result<_, _>>()
        .map_err(|e| fault(&files.certificates, e.to_string()))?;
    if chain.is_empty() {
        return Err(fault(&files.certificates, "it holds no certificate".into()));
    }
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|e| fault(&files.key, e.to_string()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| fault(&files.certificates, e.to_string()))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|e| fault(&files.key, format!("it does not go with {}: {e}", files.certificates.display())))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

impl TlsListener {
    /// Takes the connections of `tcp` until it is dropped.
    pub fn new(mut tcp: tokio::net::TcpListener, acceptor: TlsAcceptor) -> TlsListener {
        let address = tcp.local_addr();
        let (shaken, ready) = mpsc::channel(1);
        let places = Arc::new(Semaphore::new(MAX_HANDSHAKES));
        tokio::spawn(async move {
            loop {
                // It is never closed.
                let Ok(place) = places.clone().acquire_owned().await else { return };
                let (stream, from) = tokio::select! {
                    connection = Listener::accept(&mut tcp) => connection,
                    () = shaken.closed() => return,
                };
                let (acceptor, shaken) = (acceptor.clone(), shaken.clone());
                tokio::spawn(async move {
                    let _place = place;
                    // Small chunks go out at once; a stream that refuses is slower, no more.
                    let _ = stream.set_nodelay(true);
                    match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
                        // Nobody is left to serve it.
                        Ok(Ok(stream)) => _ = shaken.send((stream, from)).await,
                        Ok(Err(error)) => tracing::debug!("{from}: no TLS connection: {error}"),
                        Err(_) => tracing::debug!("{from}: no TLS handshake within {HANDSHAKE_TIMEOUT:?}"),
                    }
                });
            }
        });
        TlsListener { ready, address }
    }
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(connection) => connection,
            // The task above ends after this listener only.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.address.as_ref().copied().map_err(|e| std::io::Error::new(e.kind(), e.to_string()))
    }
}
