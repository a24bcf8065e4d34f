//! The keys of a configuration struct, as serde sees them.

use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor, value::Error};
use serde::forward_to_deserialize_any;

/// The names of a struct's fields.
pub(super) fn of<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut fields: &'static [&'static str] = &[];
    // It has no values to give, so this never succeeds.
    let _ = T::deserialize(Listing(&mut fields));
    fields
}

/// Notes which fields are asked for.
struct Listing<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Listing<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("only the fields of a struct are listed"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        *self.0 = fields;
        self.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct
        seq tuple tuple_struct map enum identifier ignored_any
    }
}
