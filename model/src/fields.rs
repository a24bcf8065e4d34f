//! Structs out of the keys and values of a configuration.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::words::plain;

/// Reads a struct. The message of a failure names the key.
pub(crate) fn read<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, String> {
    serde_path_to_error::deserialize(Value::Object(fields)).map_err(|e| match e.path().iter().next() {
        // What is missing or unknown is named by the message itself.
        None => plain(&e.inner().to_string()),
        Some(_) => format!("{}: {}", e.path(), plain(&e.inner().to_string())),
    })
}
