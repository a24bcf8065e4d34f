//! Offload moves bytes, unchanged, between device and host memory.

use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::Offload;
use dropless_core::{Backend, DType, Error, Memory};

#[test]
fn every_byte_survives_the_round_trip() {
    let host = Host::new(HostOptions::default()).unwrap();
    let backend: &dyn Backend = &host;
    for (dtype, shape) in
        [(DType::F32, vec![3, 5]), (DType::Bf16, vec![7]), (DType::E4m3, vec![2, 3, 43]), (DType::U32, vec![0, 4])]
    {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let values: Vec<u8> = (0..bytes).map(|i| u8::try_from(i * 37 % 256).unwrap()).collect();
        let from = backend.upload(dtype, &shape, &values).unwrap();
        let kept = backend.alloc(dtype, &shape, Memory::Host).unwrap();
        let back = backend.alloc(dtype, &shape, Memory::Device).unwrap();
        Offload { from: &from, to: &kept }.run(backend).unwrap();
        // The device tensor may be reused once its values are safe.
        backend.write(&from, &vec![0xA5; bytes]).unwrap();
        Offload { from: &kept, to: &back }.run(backend).unwrap();
        assert_eq!(backend.download::<u8>(&back).unwrap(), values, "{dtype:?} {shape:?}");
    }
}

#[test]
fn a_slice_goes_where_it_belongs() {
    let host = Host::new(HostOptions::default()).unwrap();
    let backend: &dyn Backend = &host;
    let from = backend.upload(DType::U32, &[2, 2], &[1u32, 2, 3, 4]).unwrap();
    let kept = backend.alloc(DType::U32, &[3, 2], Memory::Host).unwrap();
    backend.write(&kept, bytemuck::cast_slice(&[9u32; 6])).unwrap();
    Offload { from: &from, to: &kept.slice(1, 3).unwrap() }.run(backend).unwrap();
    assert_eq!(backend.download::<u32>(&kept).unwrap(), [9, 9, 1, 2, 3, 4]);
}

#[test]
fn both_ends_in_one_memory_is_an_error() {
    let host = Host::new(HostOptions::default()).unwrap();
    let from = host.alloc(DType::F32, &[2], Memory::Device).unwrap();
    let to = host.alloc(DType::F32, &[2], Memory::Device).unwrap();
    let error = Offload { from: &from, to: &to }.run(&host).unwrap_err();
    assert!(matches!(error, Error::Argument { op: "offload", field: "to", .. }), "{error}");
}
