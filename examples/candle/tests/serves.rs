//! The server takes requests before the weights are there, streams tokens, and shows its metrics.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, mpsc};

use candle_core::Device;
use pinpool_candle::checkpoint::{Size, write};
use pinpool_candle::model::{Model, decode, encode};
use pinpool_candle::server::Server;
use pinpool_candle::{Pinned, Weights};

fn ask(address: SocketAddr, request: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    let head =
        format!("{request} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n");
    stream.write_all(format!("{head}content-length: {length}\r\n\r\n{body}").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn requests_wait_for_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    write(Size::Small, 7, folder.path()).unwrap();
    let path = folder.path().to_owned();
    let (go, wait) = mpsc::channel();
    let server = Server::start(move |server| {
        let pinned = Pinned::new(&Device::Cpu, 16 << 20)?;
        let weights = Arc::new(Weights::open(&pinned, &path)?);
        server.show(&pinned, &weights).expect("the recorder is the first");
        let _ = wait.recv();
        Model::pinpool(&weights, &path, &pinned)
    })
    .unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let router = server.router();
    runtime.spawn(async move { axum::serve(listener, router).await });

    assert!(ask(address, "GET /health", "").contains("\"ready\":false"));
    let asking =
        std::thread::spawn(move || ask(address, "POST /generate", r#"{"prompt": "pages", "max_tokens": 5}"#));
    assert!(ask(address, "POST /generate", "{}").starts_with("HTTP/1.1 400"));
    go.send(()).unwrap();
    let answer = asking.join().unwrap();

    let theirs = Model::candle(folder.path(), &Device::Cpu).unwrap();
    let tokens = theirs.generate(&encode("pages"), 5, |_| true).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for token in tokens {
        assert!(answer.contains(&decode(token)), "{answer}");
    }
    let page = ask(address, "GET /metrics", "");
    assert!(page.contains("server_tokens_total 5") && page.contains("pinpool"), "{page}");
    assert!(ask(address, "GET /health", "").contains("\"ready\":true"));
}
