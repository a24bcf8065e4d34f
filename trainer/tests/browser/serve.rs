//! A folder over HTTP.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};

/// Serves a folder to whoever asks, until the process ends. Returns its address.
pub(crate) fn folder(dir: &Path) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let dir = dir.to_owned();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let dir = dir.clone();
            std::thread::spawn(move || answer(connection.unwrap(), &dir));
        }
    });
    address
}

/// Answers one request. A browser that has gone away is no failure.
fn answer(mut connection: TcpStream, dir: &Path) {
    let mut lines = BufReader::new(&connection).lines().map_while(Result::ok);
    let Some(request) = lines.next() else { return };
    lines.take_while(|line| !line.is_empty()).for_each(drop);
    let path = request.split(' ').nth(1).unwrap_or("/").split('?').next().unwrap_or("/");
    let name = if path == "/" { "index.html" } else { path.trim_start_matches('/') };
    let (status, body) = match fs::read(dir.join(PathBuf::from(name))) {
        Ok(body) => ("200 OK", body),
        Err(_) => ("404 Not Found", Vec::new()),
    };
    let kind = match name.rsplit('.').next() {
        Some("html") => "text/html",
        Some("js") => "text/javascript",
        Some("css") => "text/css",
        _ => "application/octet-stream",
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = connection.write_all(head.as_bytes()).and_then(|()| connection.write_all(&body));
}
